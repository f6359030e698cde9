// Cuts text into the pieces that a byte-level tokenizer merges in: the regular expressions of its pre-tokenizer.

#pragma once

#include <bitset>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmc {

// A class of characters: kinds of Unicode, white space, ranges; or all others.
class CharacterSet {
 public:
  void add(char32_t first, char32_t last) { ranges_.push_back({first, last}); }
  void add_kinds(unsigned kinds) { kinds_ |= kinds; }
  void add_space(bool space) { (space ? space_ : no_space_) = true; }
  void negate() { negated_ = true; }
  void finish();  // after the last change
  bool holds(char32_t c) const { return c < 128 ? ascii_[c] : found(c); }

 private:
  bool found(char32_t c) const;

  std::vector<std::pair<char32_t, char32_t>> ranges_;
  unsigned kinds_ = 0;  // a bit for each number of categories.inc
  bool space_ = false, no_space_ = false, negated_ = false;
  std::bitset<128> ascii_;
};

// A regular expression of the kind that pre-tokenizers have: alternatives of sequences of repeated classes.
class Expression {
 public:
  // Throws std::invalid_argument for whatever it does not read exactly as the library tokenizers does.
  explicit Expression(std::string_view pattern);

  // The pieces of `text`: what matches, from left to right, and what lies between. Throws RequestError when that takes
  // far longer than the expressions of real tokenizers do.
  std::vector<std::u32string_view> pieces(std::u32string_view text) const;

 private:
  enum Kind { kSet, kNotBefore, kContraction };
  struct Item {
    Kind kind;
    CharacterSet set;
    size_t least = 1, most = 1;
  };
  using Sequence = std::vector<Item>;

  class Reader;
  class Matcher;

  std::vector<Sequence> alternatives_;
};

// The characters that tokenizers' Digits cuts off.
CharacterSet digits();

// The expression of the library's ByteLevel.
extern const char* const kGpt2Expression;

}  // namespace llmc
