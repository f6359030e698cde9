// The KV cache: pages of 16 tokens that sequences take as they grow, and give back.

#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "files.h"
#include "manifest.h"

namespace llmc {

// Pages of all layers. A page has the same number in every layer and group, so one table serves all groups. Memory is
// taken from the system when a page is first written; pages are handed out lowest first.
class PagePool {
 public:
  // Room for `tokens` tokens. Throws RequestError when the system refuses the memory.
  PagePool(const KvLayout& layout, int64_t tokens);

  int64_t num_pages() const { return num_pages_; }
  int64_t free_pages() const { return num_pages_ - unused_ + int64_t(returned_.size()); }
  const std::vector<ZeroedMemory>& layers() const { return layers_; }

  // Add pages to `pages` until there are `count`. Throws RequestError, with nothing taken, when too few are free.
  void grow(std::vector<int32_t>* pages, size_t count);

  // Take the pages after the first `count` back.
  void shrink(std::vector<int32_t>* pages, size_t count);

 private:
  int64_t num_pages_, unused_ = 0;  // pages from `unused_` on were never handed out
  size_t page_bytes_ = 0;           // of a layer
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> returned_;
  std::vector<ZeroedMemory> layers_;
};

inline size_t pages_for(int64_t tokens) { return size_t((tokens + kPageTokens - 1) / kPageTokens); }

}  // namespace llmc
