// Takes weights that a file is mapped for into memory of this process, in pages of 2 MB, where that is faster: what
// runtime/loading/large_pages.py says of it holds here.

#pragma once

#include <cstddef>
#include <deque>
#include <set>
#include <vector>

namespace llmc {

class LargePages {
 public:
  // `data`: `bytes` bytes of a map, which outlives this. All are copied where copies are `faster` times as fast.
  LargePages(char* data, size_t bytes, double faster = 1.05);
  ~LargePages();
  LargePages(const LargePages&) = delete;
  LargePages& operator=(const LargePages&) = delete;

  // Whether no page will be copied any more, and how many were.
  bool done() const;
  size_t copied() const { return copied_; }

  // A step took so long, and no other reads the weights now: copy what a share of that pays for, or look.
  void worked(double seconds);

 private:
  void begin_trial();
  void look();
  bool copy(size_t page);
  bool take_room();
  void give_room_back();

  char *first_, *room_ = nullptr, *room_end_ = nullptr;  // the first page of the map; pages that belong to nobody yet
  size_t count_, bytes_;                                 // pages; bytes of the map
  std::vector<size_t> samples_;                          // pages that are copied to see, of this trial
  std::set<size_t> tried_;                               // of all trials
  size_t trials_ = 0;                                    // still to be made
  std::deque<size_t> todo_;                              // pages to be copied
  size_t copied_ = 0;
  int looks_ = 0;
  double least_[2];                 // seconds that copies took to be read, and pages before them
  double faster_, share_, credit_;  // share: of the time of steps; credit: seconds
  double longest_ = 1e300;          // seconds of a step that count: what reading all weights takes
};

}  // namespace llmc
