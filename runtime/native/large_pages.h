// Takes weights that a file is mapped for into memory of this process, in pages of 2 MB, a little after each step:
// what runtime/loading/large_pages.py says of it holds here.

#pragma once

#include <cstddef>

namespace llmc {

class LargePages {
 public:
  // `data`: `bytes` bytes of a map, which outlives this.
  LargePages(char* data, size_t bytes);
  ~LargePages();
  LargePages(const LargePages&) = delete;
  LargePages& operator=(const LargePages&) = delete;

  // Bytes that are still to be moved.
  size_t left() const { return size_t(end_ - next_); }

  // A step took so long, and no other reads the weights now: move what a share of that pays for.
  void worked(double seconds);

 private:
  bool move();
  bool take_room();
  void give_room_back();

  char *next_, *end_;                           // what is still to be moved
  char *room_ = nullptr, *room_end_ = nullptr;  // pages that belong to nobody yet
  size_t bytes_;
  double credit_;  // seconds
};

}  // namespace llmc
