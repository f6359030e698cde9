// libcudart.so.13 and what libcuda.so.1 needs, without a GPU: device memory is the host's, kernels are shared objects.
//
// Work on a stream waits until somebody waits for the stream, so that whoever reads a result or reuses a pinned buffer too
// early is wrong here too. Memory is full of what is no number when it is given out; copies out of bounds, allocations and
// waits within a capture, and kernels that fail are errors, as a driver's are. Signatures: cuda_runtime_api.h of CUDA 13.

#include "runtime.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

enum : int { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, LAUNCH_FAILED = 719, IN_CAPTURE = 900 };
enum Kind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };

using Work = std::function<int()>;
using Graph = std::vector<Work>;

struct Stream {
  std::deque<Work> waiting;
  Graph *capture = nullptr;
};

std::recursive_mutex lock;
Stream null_stream;
std::map<Stream *, bool> streams;
std::map<char *, size_t> device_memory, pinned_memory;
size_t used_bytes;
int failed = OK;       // of a kernel: every later call tells of it
int last_error = OK;
std::map<std::string, long> counts;

using Locked = std::lock_guard<std::recursive_mutex>;

int told(int status) {
  if (status) last_error = status;
  return status;
}

size_t total_bytes() {
  const char *bytes = getenv("LLMC_EMULATED_BYTES");
  return bytes ? strtoull(bytes, nullptr, 10) : size_t(8) << 30;
}

Stream &stream_of(void *handle) { return handle ? *static_cast<Stream *>(handle) : null_stream; }

// Do what is on the stream, up to what is not ready; whether all is done.
bool advance(Stream &stream) {
  while (!stream.waiting.empty()) {
    int status = failed ? failed : stream.waiting.front()();
    if (status == EMULATED_NOT_READY) return false;
    stream.waiting.pop_front();
    if (status && !failed) failed = status;
  }
  return true;
}

void finish(Stream &stream) {
  while (!advance(stream)) usleep(20);
}

void finish_all() {
  finish(null_stream);
  for (auto &[stream, _] : streams) finish(*stream);
}

bool capturing() {
  for (auto &[stream, _] : streams)
    if (stream->capture) return true;
  return false;
}

int enqueue(void *handle, Work work) {
  Stream &stream = stream_of(handle);
  if (stream.capture) {
    stream.capture->push_back(std::move(work));
    return OK;
  }
  if (&stream == &null_stream)
    for (auto &[other, _] : streams) finish(*other);
  else
    finish(null_stream);
  stream.waiting.push_back(std::move(work));
  return failed;
}

bool within(const std::map<char *, size_t> &blocks, const void *at, size_t bytes) {
  char *first = static_cast<char *>(const_cast<void *>(at));
  auto next = blocks.upper_bound(first);
  if (next == blocks.begin()) return false;
  auto [begin, size] = *std::prev(next);
  return first + bytes <= begin + size;
}

int copy(void *to, const void *from, size_t bytes, int kind, void *stream) {
  counts["copies"]++;
  bool to_device = within(device_memory, to, bytes), from_device = within(device_memory, from, bytes);
  bool wants_to = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE;
  bool wants_from = kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE;
  if (kind != DEFAULT && (to_device != wants_to || from_device != wants_from)) return INVALID_VALUE;
  auto move = [=]() -> int {
    if (kind == DEVICE_TO_HOST) counts["bytes to host"] += bytes;
    return memmove(to, from, bytes), OK;
  };
  if (!from_device && !within(pinned_memory, from, bytes)) {  // read before the call returns
    if (stream_of(stream).capture) return IN_CAPTURE;
    std::string kept(static_cast<const char *>(from), bytes);
    return enqueue(stream, [=]() -> int { return memcpy(to, kept.data(), bytes), OK; });
  }
  if (!to_device && !within(pinned_memory, to, bytes)) {
    if (stream_of(stream).capture) return IN_CAPTURE;
    int status = enqueue(stream, move);
    finish(stream_of(stream));
    return status;
  }
  return enqueue(stream, move);
}

}  // namespace

int emulated_launch(const Launch &launch, void *stream) {
  Locked locked(lock);
  if (failed) return failed;
  counts["launches"]++;
  return enqueue(stream, [launch]() -> int {
    std::vector<void *> arguments;
    for (auto &value : launch.arguments) arguments.push_back(const_cast<char *>(value.data()));
    if (const char *wrong = launch.run(launch.name.c_str(), launch.grid, launch.block, arguments.data())) {
      fprintf(stderr, "%s: %s\n", launch.name.c_str(), wrong);
      return LAUNCH_FAILED;
    }
    return OK;
  });
}

int emulated_failure() { return failed; }

int emulated_enqueue(void *stream, std::function<int()> work) {
  Locked locked(lock);
  return told(failed ? failed : enqueue(stream, std::move(work)));
}
bool emulated_holds(const void *at, size_t bytes) {
  Locked locked(lock);
  return within(device_memory, at, bytes);
}
void emulated_add(const char *what) {
  Locked locked(lock);
  counts[what]++;
}

extern "C" {

// What tests ask for: how many "launches", "copies", "captures", "graphs", "allocations", "exchanges", "bytes to host" there
// were; bytes are counted when they are copied, as often as a captured graph does it.
long emulated_count(const char *what) {
  Locked locked(lock);
  return counts[what];
}

int cudaGetDeviceCount(int *count) { return *count = 1, OK; }
int cudaSetDevice(int device) { return told(device == 0 ? OK : 101); }
int cudaGetDevice(int *device) { return *device = 0, OK; }
const char *cudaGetErrorName(int error) { return error == NO_MEMORY ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char *cudaGetErrorString(int error) {
  return error == NO_MEMORY ? "out of memory" : error == LAUNCH_FAILED ? "unspecified launch failure"
       : error == IN_CAPTURE ? "operation not permitted when stream is capturing" : error ? "invalid argument" : "no error";
}
int cudaGetLastError() { int error = last_error; return last_error = OK, error; }
int cudaPeekAtLastError() { return last_error; }

int cudaDeviceGetAttribute(int *value, int attribute, int device) { return emulated_attribute(value, attribute, device); }
int cudaGetDeviceProperties(void *properties, int) { return strcpy(static_cast<char *>(properties), "emulated"), OK; }

int cudaMemGetInfo(size_t *free, size_t *total) {
  Locked locked(lock);
  return *total = total_bytes(), *free = *total - used_bytes, OK;
}

int cudaMalloc(void **pointer, size_t bytes) {
  Locked locked(lock);
  if (capturing()) return told(IN_CAPTURE);
  if (used_bytes + bytes > total_bytes()) return told(NO_MEMORY);
  counts["allocations"]++;
  bytes = bytes ? bytes : 1;
  char *memory = static_cast<char *>(aligned_alloc(256, (bytes + 255) / 256 * 256));
  memset(memory, 0xff, bytes);
  device_memory[memory] = bytes;
  used_bytes += bytes;
  return *pointer = memory, OK;
}

int cudaFree(void *pointer) {
  Locked locked(lock);
  if (!pointer) return OK;
  auto found = device_memory.find(static_cast<char *>(pointer));
  if (found == device_memory.end()) return told(INVALID_VALUE);
  if (capturing()) return told(IN_CAPTURE);
  finish_all();
  used_bytes -= found->second;
  device_memory.erase(found);
  return free(pointer), OK;
}

int cudaMallocHost(void **pointer, size_t bytes) {
  Locked locked(lock);
  char *memory = static_cast<char *>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  pinned_memory[memory] = bytes;
  return *pointer = memory, OK;
}

int cudaFreeHost(void *pointer) {
  Locked locked(lock);
  if (!pinned_memory.erase(static_cast<char *>(pointer))) return told(INVALID_VALUE);
  finish_all();
  return free(pointer), OK;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  Locked locked(lock);
  return told(copy(to, from, bytes, kind, stream));
}
int cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t rows, int kind, void *stream) {
  Locked locked(lock);
  if (!rows || !width) return OK;
  if (kind != DEVICE_TO_DEVICE || width > pitch || width > to_pitch) return told(INVALID_VALUE);
  if (!within(device_memory, to, to_pitch * (rows - 1) + width)) return told(INVALID_VALUE);
  if (!within(device_memory, from, pitch * (rows - 1) + width)) return told(INVALID_VALUE);
  counts["copies"]++;
  return told(enqueue(stream, [=]() -> int {
    for (size_t row = 0; row < rows; row++)
      memmove(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * pitch, width);
    return OK;
  }));
}
int cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, void *stream) {
  return cudaMemcpyAsync(to, from, bytes, DEVICE_TO_DEVICE, stream);
}

int cudaStreamCreateWithFlags(void **stream, unsigned) {
  Locked locked(lock);
  auto *made = new Stream;
  streams[made] = true;
  return *stream = made, OK;
}
int cudaStreamCreate(void **stream) { return cudaStreamCreateWithFlags(stream, 0); }
int cudaStreamDestroy(void *stream) {
  Locked locked(lock);
  auto *made = static_cast<Stream *>(stream);
  if (!streams.erase(made)) return told(INVALID_VALUE);
  finish(*made);
  return delete made, OK;
}
int cudaStreamSynchronize(void *stream) {
  Locked locked(lock);
  if (stream_of(stream).capture) return told(IN_CAPTURE);
  finish(stream_of(stream));
  return told(failed);
}
int cudaStreamQuery(void *stream) {
  Locked locked(lock);
  if (stream_of(stream).capture) return told(IN_CAPTURE);
  return told(advance(stream_of(stream)) ? failed : EMULATED_NOT_READY);
}
int cudaStreamWaitEvent(void *, void *, unsigned) {
  Locked locked(lock);
  return finish_all(), told(failed);
}

int cudaEventCreate(void **event) { return *event = malloc(1), OK; }
int cudaEventCreateWithFlags(void **event, unsigned) { return cudaEventCreate(event); }
int cudaEventQuery(void *) {
  Locked locked(lock);
  bool done = advance(null_stream);
  for (auto &[stream, _] : streams) done = advance(*stream) && done;
  return told(done ? failed : EMULATED_NOT_READY);
}
int cudaEventDestroy(void *event) { return free(event), OK; }
int cudaEventRecord(void *, void *) { return OK; }
int cudaEventSynchronize(void *) { return cudaStreamWaitEvent(nullptr, nullptr, 0); }
int cudaEventElapsedTime(float *milliseconds, void *, void *) { return *milliseconds = 0, OK; }

int cudaStreamBeginCapture(void *stream, int) {
  Locked locked(lock);
  if (!stream || stream_of(stream).capture) return told(IN_CAPTURE);
  counts["captures"]++;
  return stream_of(stream).capture = new Graph, OK;
}
int cudaStreamEndCapture(void *stream, void **graph) {
  Locked locked(lock);
  *graph = stream_of(stream).capture;
  stream_of(stream).capture = nullptr;
  return told(*graph ? OK : INVALID_VALUE);
}
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long) {
  return *executable = new Graph(*static_cast<Graph *>(graph)), OK;
}
int cudaGraphLaunch(void *executable, void *stream) {
  Locked locked(lock);
  counts["graphs"]++;
  for (const Work &work : *static_cast<Graph *>(executable))
    if (int status = enqueue(stream, work)) return told(status);
  return OK;
}
int cudaGraphDestroy(void *graph) { return delete static_cast<Graph *>(graph), OK; }
int cudaGraphExecDestroy(void *graph) { return delete static_cast<Graph *>(graph), OK; }

}  // extern "C"
