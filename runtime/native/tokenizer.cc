#include "tokenizer.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "errors.h"

namespace llmc {
namespace {

constexpr size_t kMostTextBytes = 256 << 20;
constexpr const char* kHiding = "\xEF\xB7\x90";     // U+FDD0 begins a token that no text becomes
constexpr const char* kSpaceMark = "\xE2\x96\x81";  // U+2581, what SentencePiece writes for a space

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size()) {
    text.replace(at, what.size(), by);
  }
  return text;
}

std::string byte_level_bytes(const std::string& token) {
  std::string bytes;
  for (char32_t c : characters(token)) {
    unsigned char byte;
    if (!byte_of(c, &byte)) return token;  // a token with any other character is plain text
    bytes += char(byte);
  }
  return bytes;
}

std::string spaced_bytes(const std::string& token) { return replaced(replaced(token, kHiding, ""), kSpaceMark, " "); }

// SentencePiece spells a byte that is in no token as <0xE2>.
std::string fallback_bytes(const std::string& token) {
  bool byte = token.size() == 6 && token.rfind("<0x", 0) == 0 && token[5] == '>';
  if (byte && token.find_first_not_of("0123456789abcdefABCDEF", 3) == 5) {
    return std::string(1, char(std::stoi(token.substr(3, 2), nullptr, 16)));
  }
  return spaced_bytes(token);
}

}  // namespace

Tokenizer::Tokenizer(std::string_view tokenizer_json) {
  try {
    Json document = parse_json(tokenizer_json);
    read_vocab(document.get("model"));
    read_added(document);
    read_decoder(document.get("decoder"));
    try {
      encoder_ = std::make_unique<TextEncoder>(document, vocab_);
    } catch (const std::invalid_argument& error) {
      refusal_ = error.what();
    }
  } catch (const std::invalid_argument& error) {
    throw ArtifactError(std::string("tokenizer.json cannot be read: ") + error.what());
  }
}

void Tokenizer::read_vocab(const Json& model) {
  const Json& vocab = model.get("vocab");
  int64_t id = 0;
  for (const Json& entry : vocab.list) {  // of Unigram: pairs of token and score
    if (!entry.is_list() || entry.list.empty() || !entry.list[0].is_text()) throw std::invalid_argument("a bad vocab");
    vocab_.add(entry.list[0].text, int32_t(id++));
  }
  for (const auto& [token, value] : vocab.object) {
    if (!value.whole(0, INT32_MAX, &id)) throw std::invalid_argument("a token without an id");
    vocab_.add(token, int32_t(id));
  }
  if (vocab_.size() == 0) throw std::invalid_argument("its model has no vocab");
  vocab_.shrink();
  numbers_.resize(vocab_.size());
  std::iota(numbers_.begin(), numbers_.end(), 0);
  auto before = [&](uint32_t a, uint32_t b) { return vocab_.id(a) < vocab_.id(b); };
  std::stable_sort(numbers_.begin(), numbers_.end(), before);
}

void Tokenizer::read_added(const Json& document) {
  for (const Json& token : document.get("added_tokens").list) {
    int64_t id;
    if (!token.get("id").whole(0, INT32_MAX, &id)) throw std::invalid_argument("an added token without an id");
    added_.emplace_back(int32_t(id), token.get("content").text);
    if (token.get("special").flag) special_.insert(int32_t(id));
  }
  std::stable_sort(added_.begin(), added_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
}

std::string Tokenizer::token(int32_t id) const {
  auto added = std::upper_bound(added_.begin(), added_.end(), id,
                                [](int32_t id, const auto& token) { return id < token.first; });
  if (added != added_.begin() && added[-1].first == id) return added[-1].second;
  auto number = std::upper_bound(numbers_.begin(), numbers_.end(), id,
                                 [&](int32_t id, uint32_t number) { return id < vocab_.id(number); });
  bool found = number != numbers_.begin() && vocab_.id(number[-1]) == id;
  return found ? std::string(vocab_.token(number[-1])) : "";
}

// The rules of runtime/text/tokenizer.py, _bytes_rule.
void Tokenizer::read_decoder(const Json& decoder) {
  bool byte_level = false, fallback = false, spaces = false, drops = false, others = false;
  for (const Json& step : decoder.steps("decoders")) {
    const std::string &type = step.get("type").text, &content = step.get("content").text;
    const std::string& pattern = step.get("pattern").get("String").text;
    int64_t at;
    if (type == "ByteLevel") {
      byte_level = true;
    } else if (type == "ByteFallback") {
      fallback = true;
    } else if (type == "Strip") {
      others = others || content != " " || !step.get("start").whole(1, 1, &at) || !step.get("stop").whole(0, 0, &at);
      drops = true;
    } else if (type == "Replace" && pattern == kSpaceMark) {
      others = others || content != " ";
      spaces = true;
    } else if (type == "Metaspace") {
      others = others || (step.find("replacement") && step.get("replacement").text != kSpaceMark);
      spaces = true;
      drops = drops || step.get("prepend_scheme").text != "never";
    } else if (type != "Fuse" && !(type == "Replace" && pattern == kHiding && content.empty())) {
      others = true;
    }
  }
  if (others || (byte_level && (fallback || spaces || drops)) || !(byte_level || spaces)) return;
  spelling_ = byte_level ? kByteLevel : fallback ? kFallback : kSpaced;
  drops_space_ = drops;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  if (!encoder_) {
    throw RequestError("prompt: this runtime does not turn text into ids for a tokenizer.json with " + refusal_ +
                       "; give it ids");
  }
  if (text.size() > kMostTextBytes) throw RequestError("prompt: longer than any context");
  if (!is_utf8(text)) throw RequestError("prompt: it is not UTF-8");
  return encoder_->encode(text);
}

std::string Tokenizer::token_bytes(int32_t id) const {
  if (special_.count(id)) return "";
  std::string token = this->token(id);
  if (spelling_ == kByteLevel) return byte_level_bytes(token);
  return spelling_ == kFallback ? fallback_bytes(token) : spaced_bytes(token);
}

bool Tokenizer::drops_space() const {
  if (spelling_ == kUnknown) {
    throw RequestError("tokenizer.json: its decoder joins tokens in a way that this runtime does not know; take ids");
  }
  return drops_space_;
}

std::string TextStream::push(int32_t id) {
  std::string bytes = tokenizer_.token_bytes(id);
  if (drop_space_ && !bytes.empty()) {
    if (bytes[0] == ' ') bytes.erase(0, 1);
    drop_space_ = false;
  }
  return utf8_.push(bytes);
}

}  // namespace llmc
