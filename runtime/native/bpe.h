// Byte pair encoding: which tokens the bytes of a piece become.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"
#include "vocab.h"

namespace llmc {

// The byte of each printable character that byte-level tokenizers spell bytes with, the other way round, or both.
// https://github.com/openai/gpt-2/blob/master/src/encoder.py bytes_to_unicode
const std::string& spelled_byte(unsigned char byte);
bool byte_of(char32_t character, unsigned char* byte);

class Bpe {
 public:
  // `model`: of a tokenizer.json. Throws std::invalid_argument for whatever it does not do exactly.
  Bpe(const Json& model, const Vocab& vocab);

  // The ids of a piece of text, given as UTF-8, appended.
  void encode(const std::string& piece, std::vector<int32_t>* ids) const;

 private:
  struct Merge {
    uint64_t pair;  // left id * 2^32 + right id
    int32_t rank, id;
  };
  const Merge* find(int32_t left, int32_t right) const;

  const Vocab& vocab_;
  std::vector<Merge> merges_;  // by pair; of those with one pair the last one counts
  int32_t byte_ids_[256];
  bool whole_pieces_;  // a piece that is a token is not merged
};

}  // namespace llmc
