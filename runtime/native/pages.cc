#include "pages.h"

#include "errors.h"

namespace llmc {

PagePool::PagePool(const KvLayout& layout, int64_t tokens) : num_pages_(int64_t(pages_for(tokens))) {
  size_t bytes;
  if (num_pages_ > INT32_MAX || __builtin_mul_overflow(layout.page_bytes(), size_t(num_pages_), &bytes)) {
    throw RequestError("cache_tokens: " + std::to_string(tokens) + " tokens are more than any memory holds");
  }
  for (int64_t layer = 0; layer < layout.layers; ++layer) {
    layers_.emplace_back(bytes, double(layer) / double(layout.layers));
  }
  page_bytes_ = layout.page_bytes();
}

void PagePool::grow(std::vector<int32_t>* pages, size_t count) {
  if (count <= pages->size()) return;
  size_t more = count - pages->size();
  if (int64_t(more) > free_pages()) {
    throw RequestError("the KV cache is full: " + std::to_string(more) + " more pages of 16 tokens wanted, " +
                       std::to_string(free_pages()) + " of " + std::to_string(num_pages_) +
                       " free; open with more cache_tokens");
  }
  pages->reserve(count);
  while (pages->size() < count) {
    if (returned_.empty()) {
      pages->push_back(int32_t(unused_++));
    } else {
      pages->push_back(returned_.top());
      returned_.pop();
    }
  }
  for (ZeroedMemory& layer : layers_) layer.use(size_t(unused_) * page_bytes_);
}

void PagePool::shrink(std::vector<int32_t>* pages, size_t count) {
  for (size_t i = count; i < pages->size(); ++i) returned_.push((*pages)[i]);
  if (count < pages->size()) pages->resize(count);
}

}  // namespace llmc
