// Text to token ids, for byte-level BPE: the ids that the library tokenizers gives, or a refusal.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bpe.h"
#include "json.h"
#include "split.h"
#include "vocab.h"

namespace llmc {

class TextEncoder {
 public:
  // `document`: a tokenizer.json; `vocab`: of its model. Throws std::invalid_argument naming what it does not do.
  TextEncoder(const Json& document, const Vocab& vocab);

  // The ids of a text in UTF-8.
  std::vector<int32_t> encode(std::string_view text) const;

 private:
  struct Added {
    std::u32string text;
    int32_t id;
  };
  struct Step {  // of the pre-tokenizer, which does what is set
    bool prefix_space = false;
    std::unique_ptr<Expression> expression;
    std::unique_ptr<CharacterSet> digits;
    bool single_digits = false;
  };

  void read_added(const Json& tokens, const Vocab& vocab);
  void read_step(const Json& step);
  void encode_between(std::u32string_view text, size_t set, std::vector<int32_t>* ids) const;
  void encode_plain(std::u32string_view text, std::vector<int32_t>* ids) const;

  // By first character, longest first: those looked for before normalization, and those after.
  std::unordered_map<char32_t, std::vector<Added>> added_[2];
  std::vector<Step> steps_;
  bool byte_level_ = false;
  Bpe bpe_;
};

}  // namespace llmc
