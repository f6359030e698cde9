// CUDA C++ on a CPU: the words of the language that TVM's generated source uses, and the threads of a block as fibers.
//
// It is put in front of that source, which g++ then compiles into a shared object; runtime.cc loads it in a cubin's place.
// One block runs at a time. Its threads take turns at barriers and shuffles, in an order that changes from turn to turn,
// so that what only works in one order does not work here.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__ __restrict

#define LLMC_VECTOR(name, type, bytes) \
  struct alignas(2 * (bytes)) name##2 { type x, y; }; \
  struct alignas(4 * (bytes) > 16 ? 16 : 4 * (bytes)) name##4 { type x, y, z, w; }; \
  [[maybe_unused]] static name##2 make_##name##2(type x, type y) { return {x, y}; } \
  [[maybe_unused]] static name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
LLMC_VECTOR(float, float, 4)
LLMC_VECTOR(int, int, 4)
LLMC_VECTOR(uint, unsigned, 4)
LLMC_VECTOR(ushort, unsigned short, 2)
LLMC_VECTOR(short, short, 2)
LLMC_VECTOR(uchar, unsigned char, 1)
LLMC_VECTOR(longlong, long long, 8)

struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;

template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
[[maybe_unused]] static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
[[maybe_unused]] static float __fdividef(float a, float b) { return a / b; }

namespace emulated {

constexpr unsigned WARP = 32, MOST_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 << 10;

enum State { READY, AT_BLOCK, AT_WARP, DONE };

struct Fiber {
  void *stack_pointer;
  State state;
  Place place;
};

using Kernel = void (*)(void **);

static Fiber fibers[MOST_THREADS];
static char *stacks;
static void *scheduler;
static unsigned threads, current;
static Kernel kernel;
static void **arguments;
alignas(16) static char slots[MOST_THREADS][32];  // what a thread shows the others of its warp

// Save the registers that calls must keep, leave this stack for another one, and take up what was saved there.
extern "C" void llmc_switch(void **from, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.local llmc_switch
llmc_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#else
#error "fibers are written for x86-64"
#endif

static void leave(State state) {
  Fiber &fiber = fibers[current];
  fiber.state = state;
  llmc_switch(&fiber.stack_pointer, scheduler);
}

static void begin() {
  kernel(arguments);
  leave(DONE);
  abort();
}

static void prepare(unsigned thread) {
  Fiber &fiber = fibers[thread];
  fiber.state = READY;
  fiber.place = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
  void **top = reinterpret_cast<void **>(stacks + (thread + 1) * STACK_BYTES);
  *--top = nullptr;                            // as if begin had been called: the stack is aligned so
  *--top = reinterpret_cast<void *>(&begin);   // where the first switch returns to
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  fiber.stack_pointer = top;
}

static void run(unsigned thread) {
  current = thread;
  threadIdx = fibers[thread].place;
  llmc_switch(&scheduler, fibers[thread].stack_pointer);
}

static unsigned in_state(unsigned first, unsigned count, State state) {
  unsigned found = 0;
  for (unsigned thread = first; thread < first + count; thread++) found += fibers[thread].state == state;
  return found;
}

static void release(unsigned first, unsigned count, State state) {
  for (unsigned thread = first; thread < first + count; thread++)
    if (fibers[thread].state == state) fibers[thread].state = READY;
}

// 0, or what is wrong.
static const char *run_block() {
  for (unsigned thread = 0; thread < threads; thread++) prepare(thread);
  for (unsigned turn = 0;; turn++) {
    for (unsigned each = 0; each < threads; each++) {
      unsigned thread = turn % 2 ? threads - 1 - each : (each + turn * WARP) % threads;
      if (fibers[thread].state == READY) run(thread);
    }
    bool freed = false;
    for (unsigned warp = 0; warp < threads; warp += WARP) {
      unsigned waiting = in_state(warp, WARP, AT_WARP);
      if (waiting == WARP) {
        release(warp, WARP, AT_WARP);
        freed = true;
      } else if (waiting) {
        return "a shuffle that only some threads of a warp reach";
      }
    }
    unsigned done = in_state(0, threads, DONE), waiting = in_state(0, threads, AT_BLOCK);
    if (done == threads) return nullptr;
    if (freed) continue;
    if (waiting != threads) return "a barrier that only some threads of a block reach";
    release(0, threads, AT_BLOCK);
  }
}

static const char *run_grid(Kernel function, const unsigned *grid, const unsigned *block, void **given) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  threads = block[0] * block[1] * block[2];
  if (!threads || threads > MOST_THREADS || threads % WARP) return "a block of no such size";
  if (!stacks) stacks = static_cast<char *>(aligned_alloc(4096, MOST_THREADS * STACK_BYTES));
  kernel = function;
  arguments = given;
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        if (const char *wrong = run_block()) return wrong;
      }
  return nullptr;
}

}  // namespace emulated

[[maybe_unused]] static void __syncthreads() { emulated::leave(emulated::AT_BLOCK); }
[[maybe_unused]] static void __syncwarp(unsigned = ~0u) { emulated::leave(emulated::AT_WARP); }

// What thread `lane` of the warp shows: all of them show and look at the same time.
template <class T> static T llmc_of_lane(T value, unsigned lane) {
  using namespace emulated;
  static_assert(sizeof(T) <= sizeof(slots[0]));
  unsigned first = current & ~(WARP - 1);
  memcpy(slots[current], &value, sizeof value);
  leave(AT_WARP);
  memcpy(&value, slots[first + (lane & (WARP - 1))], sizeof value);
  leave(AT_WARP);
  return value;
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return llmc_of_lane(value, emulated::current ^ mask);
}
template <class T> static T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return llmc_of_lane(value, (emulated::current & ~(width - 1)) + lane);
}
template <class T> static T __shfl_down_sync(unsigned, T value, unsigned by, int = 32) {
  unsigned lane = emulated::current % emulated::WARP;
  return llmc_of_lane(value, lane + by < emulated::WARP ? lane + by : lane);
}

[[maybe_unused]] static unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {
  uint64_t both = low | static_cast<uint64_t>(high) << 32;
  unsigned found = 0;
  for (unsigned at = 0; at < 4; at++) found |= static_cast<unsigned>(both >> 8 * (chosen >> 4 * at & 7) & 0xff) << 8 * at;
  return found;
}

// targets/cuda/prelude.py, whose functions are inline PTX, in C++. The layout of operands is what it says there.
[[maybe_unused]] static unsigned llmc_bf16_pair(float low, float high) {
  auto rounded = [](float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fffu;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}
[[maybe_unused]] static float llmc_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
[[maybe_unused]] static unsigned llmc_bf16_add(unsigned a, unsigned b) {
  return llmc_bf16_pair(llmc_float(a << 16) + llmc_float(b << 16),
                        llmc_float(a & 0xffff0000u) + llmc_float(b & 0xffff0000u));
}
[[maybe_unused]] static float llmc_exp2(float x) { return exp2f(x); }
[[maybe_unused]] static int __popc(unsigned word) { return __builtin_popcount(word); }
[[maybe_unused]] static unsigned llmc_votes(int holds) {
  using namespace emulated;
  unsigned first = current & ~(WARP - 1), found = 0;
  memcpy(slots[current], &holds, sizeof holds);
  leave(AT_WARP);
  for (unsigned lane = 0; lane < WARP; lane++) {
    memcpy(&holds, slots[first + lane], sizeof holds);
    found |= static_cast<unsigned>(holds != 0) << lane;
  }
  leave(AT_WARP);
  return found;
}
[[maybe_unused]] static float llmc_half(unsigned bits) {
  float size = llmc_float((bits & 0x7fff) << 13) * llmc_float(0x77800000);  // by 2^112: exponents begin elsewhere
  return bits & 0x8000 ? -size : size;
}
[[maybe_unused]] static unsigned llmc_word_at(const unsigned *words, unsigned bytes) { return words[bytes / 4]; }

// Copies arrive when their thread waits for them: until then what is read there is no number.
namespace emulated {
struct Copy { char bytes[16]; void *to; unsigned group; };
struct Copies { Copy waiting[256]; unsigned count, groups; };
static Copies copies[MOST_THREADS];
}  // namespace emulated
[[maybe_unused]] static void llmc_after_launches() {}  // one launch ends before the next begins

[[maybe_unused]] static void llmc_copy_async(void *shared, const void *given, unsigned bytes) {
  emulated::Copies &own = emulated::copies[emulated::current];
  if (own.count == sizeof(own.waiting) / sizeof(own.waiting[0]) || reinterpret_cast<uintptr_t>(shared) % 16 ||
      reinterpret_cast<uintptr_t>(given) % 16)
    abort();
  emulated::Copy &copy = own.waiting[own.count++];
  memset(copy.bytes, 0, 16);
  memcpy(copy.bytes, given, bytes);
  memset(shared, 0xff, 16);
  copy.to = shared;
  copy.group = own.groups;
}
[[maybe_unused]] static void llmc_load_pair(unsigned *to, const unsigned *given) { memcpy(to, given, 8); }
[[maybe_unused]] static void llmc_load_pair_now(unsigned *to, const void *given) { memcpy(to, given, 8); }
[[maybe_unused]] static void llmc_commit_copies() { emulated::copies[emulated::current].groups++; }
template <unsigned GROUPS> static void llmc_wait_copies() {
  emulated::Copies &own = emulated::copies[emulated::current];
  unsigned left = 0;
  for (unsigned i = 0; i < own.count; i++) {
    emulated::Copy &copy = own.waiting[i];
    if (copy.group + GROUPS < own.groups) memcpy(copy.to, copy.bytes, 16);
    else own.waiting[left++] = copy;
  }
  own.count = left;
}
[[maybe_unused]] static void llmc_mma_m16n8k16_bf16(float *sums, const unsigned *a, const unsigned *b) {
  using namespace emulated;
  struct Words { unsigned a[4], b[2]; };
  static_assert(sizeof(Words) <= sizeof(slots[0]));
  auto part = [](unsigned word, unsigned half) {
    unsigned bits = half ? word & 0xffff0000u : word << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  };
  unsigned first = current & ~(WARP - 1), lane = current - first;
  memcpy(slots[current], a, 16);
  memcpy(slots[current] + 16, b, 8);
  leave(AT_WARP);
  for (unsigned sum = 0; sum < 4; sum++) {
    unsigned row = lane / 4 + (sum / 2) * 8, column = lane % 4 * 2 + sum % 2;
    for (unsigned k = 0; k < 16; k++) {
      auto *of_a = reinterpret_cast<Words *>(slots[first + row % 8 * 4 + k % 8 / 2]);
      auto *of_b = reinterpret_cast<Words *>(slots[first + column * 4 + k % 8 / 2]);
      sums[sum] += part(of_a->a[k / 8 * 2 + row / 8], k % 2) * part(of_b->b[k / 8], k % 2);
    }
  }
  leave(AT_WARP);
}
