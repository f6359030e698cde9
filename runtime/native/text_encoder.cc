#include "text_encoder.h"

#include <algorithm>
#include <stdexcept>

#include "text.h"

namespace llmc {
namespace {

const Json& model_of(const Json& document) {
  const Json& model = document.get("model");
  if (model.get("type").text != "BPE") throw std::invalid_argument("a model that is no BPE");
  return model;
}

}  // namespace

TextEncoder::TextEncoder(const Json& document, const Vocab& vocab) : bpe_(model_of(document), vocab) {
  if (document.get("normalizer").kind != Json::kNull) throw std::invalid_argument("a normalizer");
  read_added(document.get("added_tokens"), vocab);
  for (const Json& step : document.get("pre_tokenizer").steps("pretokenizers")) read_step(step);
  if (!byte_level_) throw std::invalid_argument("a pre-tokenizer that does not end in bytes");
}

void TextEncoder::read_added(const Json& tokens, const Vocab& vocab) {
  int64_t next = int64_t(vocab.size());  // where the library numbers those that the vocabulary lacks
  for (const Json& token : tokens.list) {
    const std::string& content = token.get("content").text;
    int32_t known = vocab.find(content);
    int64_t id = known < 0 ? next++ : known;
    if (content.empty() || !token.get("id").whole(id, id, &id)) {
      throw std::invalid_argument("added tokens that are numbered in ways of their own");
    }
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      if (token.get(key).flag) throw std::invalid_argument(std::string("an added token with ") + key);
    }
    std::u32string text = characters(content);
    added_[token.get("normalized").flag][text[0]].push_back({text, int32_t(id)});
  }
  for (auto& set : added_) {
    for (auto& [first, alike] : set) {
      std::stable_sort(alike.begin(), alike.end(), [](auto& a, auto& b) { return a.text.size() > b.text.size(); });
    }
  }
}

void TextEncoder::read_step(const Json& step) {
  const std::string& type = step.get("type").text;
  if (byte_level_) throw std::invalid_argument("a pre-tokenizer after ByteLevel");
  Step next;
  if (type == "Split") {
    const Json& pattern = step.get("pattern").get("Regex");
    if (!pattern.is_text() || step.get("behavior").text != "Isolated" || step.get("invert").flag) {
      throw std::invalid_argument("a pre-tokenizer Split of its own kind");
    }
    next.expression = std::make_unique<Expression>(pattern.text);
  } else if (type == "Digits") {
    next.digits = std::make_unique<CharacterSet>(digits());
    next.single_digits = step.get("individual_digits").flag;
  } else if (type == "ByteLevel") {
    byte_level_ = true;
    next.prefix_space = step.get("add_prefix_space").flag;
    bool cuts = step.get("use_regex").kind == Json::kNull || step.get("use_regex").flag;
    if (cuts) next.expression = std::make_unique<Expression>(kGpt2Expression);
  } else {
    throw std::invalid_argument("a pre-tokenizer " + type.substr(0, 40));
  }
  steps_.push_back(std::move(next));
}

std::vector<int32_t> TextEncoder::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  std::u32string all = characters(text);
  encode_between(all, 0, &ids);
  return ids;
}

// Encode what lies between the added tokens of a set: of those that begin at one place the longest is taken.
void TextEncoder::encode_between(std::u32string_view text, size_t set, std::vector<int32_t>* ids) const {
  if (set == 2) return encode_plain(text, ids);
  size_t from = 0;
  for (size_t at = 0; at < text.size();) {
    auto alike = added_[set].find(text[at]);
    const Added* found = nullptr;
    if (alike != added_[set].end()) {
      for (const Added& token : alike->second) {
        if (!found && text.substr(at, token.text.size()) == token.text) found = &token;
      }
    }
    if (!found) {
      ++at;
      continue;
    }
    encode_between(text.substr(from, at - from), set + 1, ids);
    ids->push_back(found->id);
    from = at += found->text.size();
  }
  encode_between(text.substr(from), set + 1, ids);
}

namespace {

// Runs of characters in the set and runs of others; `single`: each character of the set by itself.
std::vector<std::u32string_view> runs(std::u32string_view text, const CharacterSet& set, bool single) {
  std::vector<std::u32string_view> out;
  for (size_t from = 0, at = 0; from < text.size(); from = at) {
    bool in = set.holds(text[from]);
    for (at = from + 1; at < text.size() && !(single && in) && set.holds(text[at]) == in;) ++at;
    out.push_back(text.substr(from, at - from));
  }
  return out;
}

}  // namespace

void TextEncoder::encode_plain(std::u32string_view text, std::vector<int32_t>* ids) const {
  if (text.empty()) return;
  std::vector<std::u32string_view> pieces = {text};
  std::vector<std::u32string> spaced;  // keeps the pieces that got a space in front
  for (const Step& step : steps_) {
    std::vector<std::u32string_view> next;
    if (step.prefix_space) spaced.reserve(pieces.size());  // so that they stay where they are
    for (std::u32string_view piece : pieces) {
      if (step.prefix_space && piece[0] != U' ') piece = spaced.emplace_back(U" " + std::u32string(piece));
      std::vector<std::u32string_view> cut = {piece};
      if (step.expression) cut = step.expression->pieces(piece);
      if (step.digits) cut = runs(piece, *step.digits, step.single_digits);
      next.insert(next.end(), cut.begin(), cut.end());
    }
    pieces = std::move(next);
  }
  std::string bytes;
  for (std::u32string_view piece : pieces) {
    bytes.clear();
    for (char32_t c : piece) append_utf8(c, &bytes);
    bpe_.encode(bytes, ids);
  }
}

}  // namespace llmc
