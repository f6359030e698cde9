// The tokenizer.json of an artifact: ids to text, as Python's runtime does it (runtime/text/tokenizer.py).

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "json.h"
#include "text.h"
#include "text_encoder.h"
#include "vocab.h"

namespace llmc {

class Tokenizer {
 public:
  // Throws ArtifactError when it cannot be read. What of it this runtime cannot do, it says when it is asked to.
  explicit Tokenizer(std::string_view tokenizer_json);

  // Token ids of a text; the texts of control tokens become those. Throws RequestError.
  std::vector<int32_t> encode(std::string_view text) const;

  // The bytes a token adds to a text; none for one that stands for no text.
  std::string token_bytes(int32_t id) const;

  // Whether a text's first space is dropped. Throws RequestError when ids cannot become text here.
  bool drops_space() const;

 private:
  enum Spelling { kByteLevel, kSpaced, kFallback, kUnknown };

  void read_vocab(const Json& model);
  void read_added(const Json& document);
  void read_decoder(const Json& decoder);
  std::string token(int32_t id) const;  // as the file spells it; nothing for none

  Vocab vocab_;
  std::vector<uint32_t> numbers_;                       // of vocab_'s tokens, by id; the last of one id counts,
  std::vector<std::pair<int32_t, std::string>> added_;  // and these, by id, before all
  std::unordered_set<int32_t> special_;
  Spelling spelling_ = kUnknown;
  bool drops_space_ = false;
  std::unique_ptr<TextEncoder> encoder_;
  std::string refusal_;  // why there is no encoder
};

// Ids to text as they come: the pieces joined are the whole text, and none ends inside a character.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer), drop_space_(tokenizer.drops_space()) {}
  std::string push(int32_t id);
  std::string finish() { return utf8_.finish(); }

 private:
  const Tokenizer& tokenizer_;
  Utf8Stream utf8_;
  bool drop_space_;
};

}  // namespace llmc
