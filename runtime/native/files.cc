#include "files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>

#include "errors.h"
#include "memory.h"
#include "sha256.h"

namespace llmc {
namespace {

constexpr size_t kBlockBytes = 1 << 20;
constexpr long long kSecond = 1'000'000'000;  // ns
constexpr long long kSettled = 50'000'000;    // ns; a younger change may share its time stamp with the next one
constexpr int kCollapse = 25;                 // MADV_COLLAPSE of Linux 6.1

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : path_(path) {
    fd_ = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);  // a pipe must not make it wait
    if (fd_ < 0) fail();
    struct stat info;
    if (fstat(fd_, &info) != 0) fail();
    if (!S_ISREG(info.st_mode)) throw ArtifactError(shown(path) + ": not a plain file");
    size_ = size_t(info.st_size);
  }
  ~Descriptor() { close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  // Up to `bytes` bytes from `at` on; 0 at the end.
  size_t read(char* to, size_t bytes, size_t at) const {
    for (;;) {
      ssize_t got = pread(fd_, to, bytes, off_t(at));
      if (got >= 0) return size_t(got);
      if (errno != EINTR) fail();
    }
  }

  int get() const { return fd_; }
  size_t size() const { return size_; }

  [[noreturn]] void fail() const { throw ArtifactError(shown(path_) + ": cannot be read: " + std::strerror(errno)); }

 private:
  std::string path_;
  int fd_ = -1;
  size_t size_ = 0;
};

long long nanoseconds(const timespec& time) { return (long long)time.tv_sec * kSecond + time.tv_nsec; }

}  // namespace

MappedFile::MappedFile(const std::string& path, size_t bytes) {
  Descriptor file(path);
  if (file.size() != bytes) fail_changed(path);
  if (bytes == 0) return;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) throw ArtifactError(shown(path) + ": cannot be mapped: " + std::strerror(errno));
  // Up to a quarter faster to read in pages of 2 MB. A system without them says so, and that is all right.
  madvise(data, bytes, MADV_HUGEPAGE);
  data_ = static_cast<char*>(data);
  size_ = bytes;
}

MappedFile::~MappedFile() {
  if (data_) munmap(data_, size_);
}

ZeroedMemory::ZeroedMemory(size_t bytes, double place) : size_(bytes), least_(size_t(kLargePage * (1 + place) / 2)) {
  map_ = mmap(nullptr, bytes + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) {
    throw RequestError("the system refuses " + std::to_string(bytes) +
                       " bytes for one layer of the KV cache; open with fewer cache_tokens");
  }
  data_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(map_) + kLargePage - 1) / kLargePage * kLargePage);
}

ZeroedMemory::~ZeroedMemory() {
  if (map_) munmap(map_, size_ + kLargePage);
}

ZeroedMemory::ZeroedMemory(ZeroedMemory&& other) noexcept
    : map_(other.map_), data_(other.data_), size_(other.size_), least_(other.least_), large_(other.large_) {
  other.map_ = nullptr;
}

void ZeroedMemory::use(size_t bytes) {
  size_t wanted = bytes < least_ ? 0 : std::min((bytes - least_) / kLargePage + 1, size_ / kLargePage);
  for (; large_ < wanted; ++large_) {
    madvise(data_ + large_ * kLargePage, kLargePage, MADV_HUGEPAGE);  // for one that nothing is in yet
    madvise(data_ + large_ * kLargePage, kLargePage, kCollapse);      // a kernel without it leaves them as they are
  }
}

std::string read_file(const std::string& path, size_t most) {
  Descriptor file(path);
  if (file.size() > most) {
    throw ArtifactError(shown(path) + ": " + std::to_string(file.size()) + " bytes, and at most " +
                        std::to_string(most) + " are read");
  }
  std::string data(file.size(), '\0');
  size_t at = 0;
  while (at < data.size()) {
    size_t got = file.read(&data[at], data.size() - at, at);
    if (got == 0) break;
    at += got;
  }
  data.resize(at);
  return data;
}

void check_present(const std::string& folder, const std::string& name, size_t bytes) {
  struct stat info = {};
  for (size_t end = 0; end != std::string::npos;) {
    end = name.find('/', end + 1);
    std::string path = folder + "/" + name.substr(0, end);
    if (lstat(path.c_str(), &info) != 0) {
      throw ArtifactError(shown(folder + "/" + name) + ": missing; copy or compile the artifact again");
    }
    if (S_ISLNK(info.st_mode)) {
      throw ArtifactError(shown(path) + ": a symbolic link; an artifact holds plain files only");
    }
  }
  std::string path = shown(folder + "/" + name);
  if (!S_ISREG(info.st_mode)) throw ArtifactError(path + ": not a plain file");
  if (size_t(info.st_size) != bytes) {
    throw ArtifactError(path + (size_t(info.st_size) < bytes ? ": cut short: got " : ": too long: got ") +
                        std::to_string(info.st_size) + " bytes, wanted " + std::to_string(bytes) +
                        "; copy or compile the artifact again");
  }
}

std::string identity(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) throw ArtifactError(shown(path) + ": missing");
  std::string out;
  for (long long field : {(long long)info.st_dev, (long long)info.st_ino, (long long)info.st_size,
                          nanoseconds(info.st_mtim), nanoseconds(info.st_ctim)}) {
    out += (out.empty() ? "" : ":") + std::to_string(field);
  }
  return out;
}

bool is_settled(const std::string& path) {
  struct stat info;
  timespec now;
  if (lstat(path.c_str(), &info) != 0 || clock_gettime(CLOCK_REALTIME, &now) != 0) return false;
  return nanoseconds(now) - std::max(nanoseconds(info.st_mtim), nanoseconds(info.st_ctim)) > kSettled;
}

void fail_changed(const std::string& path) {
  throw ArtifactError(shown(path) + ": changed while it was being loaded; load again");
}

std::string file_sha256(const std::string& path) {
  Descriptor file(path);
  Sha256 hash;
  std::string block(kBlockBytes, '\0');
  for (size_t at = 0;;) {
    size_t got = file.read(block.data(), block.size(), at);
    if (got == 0) return hash.hex();
    hash.update(block.data(), got);
    at += got;
  }
}

ptrdiff_t wrong_chunk(std::string_view data, size_t chunk_bytes, const std::vector<std::string>& chunks, int threads) {
  std::atomic<size_t> next{0};
  std::atomic<ptrdiff_t> wrong{-1};
  auto work = [&] {
    for (size_t i; wrong < 0 && (i = next++) < chunks.size();) {
      std::string_view chunk = data.substr(i * chunk_bytes, chunk_bytes);
      if (sha256_hex(chunk.data(), chunk.size()) != chunks[i]) wrong = ptrdiff_t(i);
    }
  };
  size_t count = std::min(size_t(std::max(threads, 1)), chunks.size());
  std::vector<std::thread> others;
  try {
    for (size_t i = 1; i < count; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: those there are do the work.
  }
  work();
  for (std::thread& thread : others) thread.join();
  return wrong;
}

}  // namespace llmc
