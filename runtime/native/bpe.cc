#include "bpe.h"

#include <algorithm>
#include <array>
#include <queue>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "text.h"

namespace llmc {
namespace {

struct ByteAlphabet {
  std::array<std::string, 256> spelled;
  std::unordered_map<char32_t, unsigned char> bytes;

  ByteAlphabet() {
    char32_t next = 256;
    for (unsigned byte = 0; byte < 256; ++byte) {
      bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      char32_t character = printable ? byte : next++;
      append_utf8(character, &spelled[byte]);
      bytes[character] = static_cast<unsigned char>(byte);
    }
  }
};

const ByteAlphabet& alphabet() {
  static const ByteAlphabet kAlphabet;
  return kAlphabet;
}

bool is_off(const Json& value) {
  return value.kind == Json::kNull || (value.kind == Json::kBool && !value.flag) ||
         (value.is_text() && value.text.empty());
}

// Left and right part of a merge: a list of two texts, or, in older files, one text with a space between them.
std::pair<std::string, std::string> parts(const Json& merge) {
  if (merge.is_list() && merge.list.size() == 2 && merge.list[0].is_text() && merge.list[1].is_text()) {
    return {merge.list[0].text, merge.list[1].text};
  }
  size_t space = merge.is_text() ? merge.text.find(' ') : std::string::npos;
  if (space == std::string::npos || merge.text.find(' ', space + 1) != std::string::npos) {
    throw std::invalid_argument("a merge that is no pair");
  }
  return {merge.text.substr(0, space), merge.text.substr(space + 1)};
}

uint64_t pair_of(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }

}  // namespace

const std::string& spelled_byte(unsigned char byte) { return alphabet().spelled[byte]; }

bool byte_of(char32_t character, unsigned char* byte) {
  auto found = alphabet().bytes.find(character);
  if (found == alphabet().bytes.end()) return false;
  *byte = found->second;
  return true;
}

Bpe::Bpe(const Json& model, const Vocab& vocab) : vocab_(vocab) {
  for (const char* key :
       {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "unknown_from"}) {
    if (!is_off(model.get(key))) throw std::invalid_argument(std::string("a BPE with ") + key);
  }
  whole_pieces_ = !is_off(model.get("ignore_merges"));
  for (unsigned byte = 0; byte < 256; ++byte) {
    byte_ids_[byte] = vocab.find(spelled_byte(static_cast<unsigned char>(byte)));
    if (byte_ids_[byte] < 0 && !is_off(model.get("unk_token"))) throw std::invalid_argument("bytes that are unknown");
  }
  const std::vector<Json>& merges = model.get("merges").list;
  merges_.reserve(merges.size());
  for (const Json& merge : merges) {
    auto [left, right] = parts(merge);
    int32_t l = vocab.find(left), r = vocab.find(right), both = vocab.find(left + right);
    if (l < 0 || r < 0 || both < 0) {
      throw std::invalid_argument("a merge of what is not in the vocabulary");
    }
    merges_.push_back({pair_of(l, r), int32_t(merges_.size()), both});
  }
  std::sort(merges_.begin(), merges_.end(), [](const Merge& a, const Merge& b) {
    return std::tie(a.pair, a.rank) < std::tie(b.pair, b.rank);
  });
}

const Bpe::Merge* Bpe::find(int32_t left, int32_t right) const {
  auto after = std::upper_bound(merges_.begin(), merges_.end(), pair_of(left, right),
                                [](uint64_t pair, const Merge& merge) { return pair < merge.pair; });
  return after != merges_.begin() && after[-1].pair == pair_of(left, right) ? &after[-1] : nullptr;
}

void Bpe::encode(const std::string& piece, std::vector<int32_t>* ids) const {
  if (whole_pieces_) {
    std::string spelled;
    for (char c : piece) spelled += spelled_byte(static_cast<unsigned char>(c));
    int32_t found = vocab_.find(spelled);
    if (found >= 0) {
      ids->push_back(found);
      return;
    }
  }
  // Tokens as a list with links, and the pairs that can merge: lowest rank first, of equal ones the leftmost.
  struct Symbol {
    int32_t id;
    int before, after;
  };
  struct Pair {
    int32_t rank;
    int at;
    int32_t id;
    bool operator<(const Pair& other) const { return std::tie(rank, at) > std::tie(other.rank, other.at); }
  };
  std::vector<Symbol> symbols;
  for (char c : piece) {
    int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    int at = int(symbols.size());
    if (id >= 0) symbols.push_back({id, at - 1, at + 1});  // a byte that the vocabulary lacks is left out
  }
  int count = int(symbols.size());
  if (count > 0) symbols.back().after = -1;
  std::priority_queue<Pair> pairs;
  auto offer = [&](int at) {
    if (at < 0 || symbols[size_t(at)].after < 0) return;
    const Merge* merge = find(symbols[size_t(at)].id, symbols[size_t(symbols[size_t(at)].after)].id);
    if (merge) pairs.push({merge->rank, at, merge->id});
  };
  for (int i = 0; i < count; ++i) offer(i);
  while (!pairs.empty()) {
    Pair best = pairs.top();
    pairs.pop();
    Symbol& left = symbols[size_t(best.at)];
    if (left.id < 0 || left.after < 0) continue;
    const Merge* now = find(left.id, symbols[size_t(left.after)].id);
    if (!now || now->id != best.id) continue;  // one of the two has been merged since
    Symbol& right = symbols[size_t(left.after)];
    left.id = best.id;
    left.after = right.after;
    right.id = -1;
    if (left.after >= 0) symbols[size_t(left.after)].before = best.at;
    offer(best.at);
    offer(left.before);
  }
  for (int at = count > 0 ? 0 : -1; at >= 0; at = symbols[size_t(at)].after) ids->push_back(symbols[size_t(at)].id);
}

}  // namespace llmc
