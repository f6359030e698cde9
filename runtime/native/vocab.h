// Tokens and their ids. A map of strings would take three times the memory, as much as all else that is not weights.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

class Vocab {
 public:
  // Tokens are numbered as they come. Of one that comes twice, `find` gives the first id.
  void add(std::string_view token, int32_t id);
  size_t size() const { return entries_.size(); }
  std::string_view token(size_t number) const;
  int32_t id(size_t number) const { return entries_[number].id; }

  // The id of a token, or -1.
  int32_t find(std::string_view token) const;

 private:
  struct Entry {
    uint32_t begin, bytes;  // in texts_
    int32_t id;
  };
  size_t place_of(std::string_view token) const;
  void grow();

  std::string texts_;
  std::vector<Entry> entries_;
  std::vector<int32_t> table_;  // by hash, a power of two at most half full: a token's number, or -1
};

}  // namespace llmc
