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

  // No more tokens come: give back the memory that was kept for them.
  void shrink();

  // The id of a token, or -1.
  int32_t find(std::string_view token) const;

 private:
  struct Entry {
    uint32_t begin;  // in texts_; it ends where the next one begins
    int32_t id;
  };
  size_t place_of(std::string_view token) const;
  void grow();

  std::string texts_;
  std::vector<Entry> entries_;
  std::vector<int32_t> table_;  // by hash, a power of two at most 3/4 full: a token's number, or -1
};

}  // namespace llmc
