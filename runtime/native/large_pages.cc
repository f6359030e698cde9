#include "large_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "errors.h"
#include "memory.h"

namespace llmc {
namespace {

constexpr size_t kPage = kLargePage;
constexpr size_t kRoom = 32 * kPage;   // bytes that are taken at once, and looked for in what is available
constexpr double kShare = 0.1;         // of the time of steps, for samples and looks
constexpr double kMostShare = 0.5;     // for all others: kHaste times what copies gain, and no more than this
constexpr double kHaste = 3;
constexpr double kFirst = 0.5;         // seconds of steps that pay nothing
constexpr size_t kSamples = 8;         // pages that are copied to see, of each trial
constexpr size_t kTrials = 3;          // at most
constexpr size_t kTrialPages = 100;    // that there must be for each but the first
constexpr int kLooks = 5;              // steps after which it is seen; the least times count
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

// All bits of a page, in lanes, so that memory is what it waits for.
uint64_t bits_of(const char* page) {
  constexpr size_t kLanes = 16;
  uint64_t found[kLanes] = {};
  const uint64_t* numbers = reinterpret_cast<const uint64_t*>(page);
  for (size_t at = 0; at < kPage / sizeof(uint64_t); at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) found[lane] |= numbers[at + lane];
  }
  uint64_t all = 0;
  for (uint64_t each : found) all |= each;
  return all;
}

// After a copy that could not be put at `place`, which may be empty now: have there what is in `page`.
void restore(char* place, const char* page) {
  if (mmap(place, kPage, kOurs, kNew | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw Error(LLMC_FAILED, "the system has no memory left for the weights; open with keep_mapped");
  }
  std::memcpy(place, page, kPage);
}

}  // namespace

LargePages::LargePages(char* data, size_t bytes, double faster)
    : first_(up(data)), bytes_(bytes), faster_(faster), share_(kShare), credit_(-kShare * kFirst) {
  char* end = down(data + bytes);
  count_ = end > first_ ? size_t(end - first_) / kPage : 0;
  if (count_ < 2 * kSamples || !has_large_pages()) return;
  trials_ = std::clamp(count_ / kTrialPages, size_t(1), kTrials);
  for (size_t n = 0; n < kSamples; ++n) samples_.push_back((2 * n + 1) * count_ / (2 * kSamples));
  begin_trial();
}

LargePages::~LargePages() { give_room_back(); }

bool LargePages::done() const { return todo_.empty() && (looks_ == kLooks || samples_.empty()); }

void LargePages::worked(double seconds) {
  if (done()) return;
  credit_ += share_ * std::min(seconds, longest_);
  double start = seconds_now();
  if (credit_ > 0 && todo_.empty()) {
    look();
    credit_ = std::min(credit_ - (seconds_now() - start), 0.0);
    return;  // the pages that were copied are in a cache until a step has read all
  }
  while (credit_ > 0 && !todo_.empty()) {
    size_t page = todo_.front();
    todo_.pop_front();
    if (!copy(page)) {  // the system does not want it: the file's pages stay
      todo_.clear(), samples_.clear();
      give_room_back();
    }
    credit_ -= seconds_now() - start;
    start = seconds_now();
  }
  if (todo_.empty()) credit_ = std::min(credit_, 0.0);  // a long step pays for what it is followed by
}

void LargePages::begin_trial() {
  todo_.assign(samples_.begin(), samples_.end());
  tried_.insert(samples_.begin(), samples_.end());
  looks_ = 0;
  least_[0] = least_[1] = std::numeric_limits<double>::infinity();
  --trials_;
}

// See how long copies take to be read, and the pages before them; the last time decide on all the others.
void LargePages::look() {
  for (size_t before : {0, 1}) {
    double start = seconds_now();
    uint64_t bits = 0;
    for (size_t page : samples_) bits |= bits_of(first_ + (page - before) * kPage);
    volatile uint64_t seen = bits;  // or nothing would have to be read
    (void)seen;
    least_[before] = std::min(least_[before], seconds_now() - start);
  }
  if (++looks_ < kLooks) return;
  if (least_[1] < faster_ * least_[0]) {
    if (trials_ == 0) return;
    for (size_t& page : samples_) page += 2;
    begin_trial();
    return;
  }
  for (size_t page = 0; page < count_; ++page) {
    if (!tried_.count(page)) todo_.push_back(page);
  }
  share_ = std::clamp(kHaste * (least_[1] / least_[0] - 1), kShare, kMostShare);
  longest_ = least_[1] / kSamples * double(count_);
}

// Put a copy of a page where it is; whether that was possible.
bool LargePages::copy(size_t page) {
  char* place = first_ + page * kPage;
  if (room_ == room_end_ && (available_bytes() < kTimesAvailable * bytes_ || !take_room())) return false;
  std::memcpy(room_, place, kPage);
  if (mremap(room_, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) {
    restore(place, room_);
    return false;
  }
  room_ += kPage;
  ++copied_;
  return true;
}

bool LargePages::take_room() {
  size_t size = std::min((todo_.size() + 1) * kPage, kRoom);
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
