#include "vocab.h"

#include <functional>

namespace llmc {
namespace {

constexpr size_t kFirstPlaces = 1024;

}  // namespace

std::string_view Vocab::token(size_t number) const {
  size_t begin = entries_[number].begin, next = number + 1;
  return std::string_view(texts_).substr(begin, next < entries_.size() ? entries_[next].begin - begin : texts_.npos);
}

// Where a token stands in the table, or the free place where it would.
size_t Vocab::place_of(std::string_view token) const {
  size_t mask = table_.size() - 1, place = std::hash<std::string_view>()(token) & mask;
  while (table_[place] >= 0 && this->token(size_t(table_[place])) != token) place = (place + 1) & mask;
  return place;
}

void Vocab::grow() {
  table_.assign(table_.empty() ? kFirstPlaces : 2 * table_.size(), -1);
  for (size_t number = 0; number < entries_.size(); ++number) {
    int32_t& place = table_[place_of(token(number))];
    if (place < 0) place = int32_t(number);
  }
}

void Vocab::add(std::string_view token, int32_t id) {
  if (4 * (entries_.size() + 1) > 3 * table_.size()) grow();
  int32_t& place = table_[place_of(token)];
  if (place < 0) place = int32_t(entries_.size());
  entries_.push_back({uint32_t(texts_.size()), id});
  texts_ += token;
}

void Vocab::shrink() {
  entries_.shrink_to_fit();
  texts_.shrink_to_fit();
}

int32_t Vocab::find(std::string_view token) const {
  if (table_.empty()) return -1;
  int32_t number = table_[place_of(token)];
  return number < 0 ? -1 : id(size_t(number));
}

}  // namespace llmc
