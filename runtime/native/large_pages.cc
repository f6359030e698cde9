#include "large_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "errors.h"
#include "memory.h"

namespace llmc {
namespace {

constexpr size_t kPage = 2 << 20;      // bytes
constexpr size_t kRoom = 32 * kPage;   // that are taken at once, and looked for in what is available
constexpr double kShare = 0.05;        // of the time of steps
constexpr double kFirst = 0.5;         // seconds of steps that pay nothing
constexpr size_t kTimesAvailable = 2;  // as much memory as this times the weights
constexpr int kOurs = PROT_READ | PROT_WRITE, kNew = MAP_PRIVATE | MAP_ANONYMOUS;

// The last start of a page that is not behind `address`.
char* down(char* address) { return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(address) / kPage * kPage); }

char* up(char* address) { return down(address + kPage - 1); }

// Whether the system has large pages for who asks.
bool has_large_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string kinds;
  return std::getline(file, kinds) && kinds.find("[never]") == std::string::npos;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// After a copy that could not be put at `place`, which may be empty now: have there what is in `page`.
void restore(char* place, const char* page) {
  if (mmap(place, kPage, kOurs, kNew | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw Error(LLMC_FAILED, "the system has no memory left for the weights; open with keep_mapped");
  }
  std::memcpy(place, page, kPage);
}

}  // namespace

LargePages::LargePages(char* data, size_t bytes)
    : next_(up(data)), end_(std::max(next_, down(data + bytes))), bytes_(bytes), credit_(-kShare * kFirst) {
  if (!has_large_pages()) end_ = next_;
}

LargePages::~LargePages() { give_room_back(); }

void LargePages::worked(double seconds) {
  credit_ += kShare * seconds;
  while (credit_ > 0 && left() > 0) {
    double start = seconds_now();
    if (!move()) {
      end_ = next_;  // the system does not want it: the file's pages stay
      give_room_back();
    }
    credit_ -= seconds_now() - start;
  }
}

bool LargePages::move() {
  if (room_ == room_end_ && (available_bytes() < kTimesAvailable * bytes_ || !take_room())) return false;
  std::memcpy(room_, next_, kPage);
  if (mremap(room_, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, next_) == MAP_FAILED) {
    restore(next_, room_);
    return false;
  }
  room_ += kPage, next_ += kPage;
  return true;
}

bool LargePages::take_room() {
  size_t size = std::min(left(), kRoom);
  void* found = mmap(nullptr, size + kPage, kOurs, kNew | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return false;
  char *first = static_cast<char*>(found), *last = first + size + kPage;
  room_ = up(first), room_end_ = room_ + size;
  if (room_ > first) munmap(first, size_t(room_ - first));
  if (last > room_end_) munmap(room_end_, size_t(last - room_end_));
  return madvise(room_, size, MADV_HUGEPAGE) == 0;
}

void LargePages::give_room_back() {
  if (room_ < room_end_) munmap(room_, size_t(room_end_ - room_));
  room_ = room_end_ = nullptr;
}

}  // namespace llmc
