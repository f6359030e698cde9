#include "split.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>

#include "errors.h"
#include "text.h"

namespace llmc {
namespace {

// Each entry: where a run of characters of one kind begins, times 16, plus the kind.
constexpr uint32_t kRuns[] = {
#include "categories.inc"
};
constexpr unsigned kNumber = 7, kNumeric = 10;
constexpr size_t kUnlimited = SIZE_MAX;
constexpr size_t kMostItems = 32;             // of an alternative; each is a call on the stack
constexpr size_t kStepsPerCharacter = 10000;  // a hundred times what a long run of spaces takes

// Names of kinds, and the bits of what they hold.
constexpr std::pair<std::u32string_view, unsigned> kKinds[] = {
    {U"L", 0x3E},    {U"Lu", 1 << 1}, {U"Ll", 1 << 2},      {U"Lt", 1 << 3}, {U"Lm", 1 << 4},
    {U"Lo", 1 << 5}, {U"M", 1 << 6},  {U"N", 1 << kNumber}, {U"P", 1 << 8},  {U"S", 1 << 9}};

// The only group that pre-tokenizers have. Ignoring case, s is also the long s.
constexpr std::u32string_view kContractionGroup = U"(?i:'s|'t|'re|'ve|'m|'ll|'d)";
constexpr std::u32string_view kContractions[] = {U"'s", U"'t", U"'re", U"'ve", U"'m", U"'ll", U"'d"};

unsigned kind_of(char32_t c) {
  const uint32_t* after = std::upper_bound(std::begin(kRuns), std::end(kRuns), uint32_t(c) * 16 + 15);
  return after == std::begin(kRuns) ? 0 : after[-1] % 16;
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

char32_t lower(char32_t c) { return c >= U'A' && c <= U'Z' ? c + 32 : c == 0x17F ? U's' : c; }

// Characters of the contraction at the start of `text`, 0 if there is none.
size_t contraction(std::u32string_view text) {
  for (std::u32string_view candidate : kContractions) {
    if (text.size() < candidate.size()) continue;
    bool same = true;
    for (size_t i = 0; i < candidate.size(); ++i) same = same && lower(text[i]) == candidate[i];
    if (same) return candidate.size();
  }
  return 0;
}

}  // namespace

const char* const kGpt2Expression = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

CharacterSet digits() {
  CharacterSet set;
  set.add_kinds(1u << kNumber | 1u << kNumeric);
  set.finish();
  return set;
}

bool CharacterSet::found(char32_t c) const {
  bool in = kinds_ && (kinds_ >> kind_of(c) & 1);
  in = in || (space_ && is_space(c)) || (no_space_ && !is_space(c));
  for (size_t i = 0; i < ranges_.size() && !in; ++i) in = ranges_[i].first <= c && c <= ranges_[i].second;
  return in != negated_;
}

void CharacterSet::finish() {
  for (char32_t c = 0; c < 128; ++c) ascii_[c] = found(c);
}

// Reads the pattern from left to right.
class Expression::Reader {
 public:
  explicit Reader(std::u32string_view pattern) : left_(pattern) {}

  std::vector<Sequence> alternatives() {
    std::vector<Sequence> all(1);
    while (!left_.empty()) {
      if (left_[0] == U'|') {
        left_.remove_prefix(1);
        all.emplace_back();
      } else {
        if (all.back().size() == kMostItems) fail();
        all.back().push_back(item());
      }
    }
    for (const Sequence& sequence : all) {
      bool some = std::any_of(sequence.begin(), sequence.end(),
                              [](const Item& item) { return item.kind != kNotBefore && item.least > 0; });
      if (!some) fail();  // what matches nothing is cut in ways of its own
    }
    return all;
  }

 private:
  Item item() {
    Item item;
    item.kind = kSet;
    if (taken(kContractionGroup)) {
      item.kind = kContraction;
      if (taken(U"?")) item.least = 0;
      if (!left_.empty() && quantifies(left_[0])) fail();
      return item;
    }
    if (taken(U"(?!")) {
      item.kind = kNotBefore;
      set(&item.set);
      if (!taken(U")")) fail();
      if (!left_.empty() && quantifies(left_[0])) fail();
      return item;
    }
    set(&item.set);
    repeat(&item);
    return item;
  }

  void repeat(Item* item) {
    if (taken(U"?")) {
      item->least = 0;
    } else if (taken(U"*")) {
      item->least = 0, item->most = kUnlimited;
    } else if (taken(U"+")) {
      item->most = kUnlimited;
    } else if (taken(U"{")) {
      item->least = item->most = whole();
      if (taken(U",")) item->most = whole();
      if (!taken(U"}") || item->most < item->least || item->most == 0) fail();
    } else {
      return;
    }
    if (!left_.empty() && quantifies(left_[0])) fail();  // lazy or possessive
  }

  size_t whole() {
    size_t value = 0, figures = 0;
    for (; !left_.empty() && left_[0] >= U'0' && left_[0] <= U'9' && figures < 5; ++figures) {
      value = 10 * value + size_t(next() - U'0');
    }
    if (figures == 0 || figures > 4) fail();
    return value;
  }

  // One character, an escape, or a class in brackets.
  void set(CharacterSet* set) {
    if (left_.empty()) fail();
    if (taken(U"[")) {
      if (taken(U"^")) set->negate();
      for (bool first = true; !taken(U"]"); first = false) member(set, first);
    } else if (left_[0] == U'\\') {
      escape(set);
    } else {
      char32_t c = next();
      if (std::u32string_view(U".^$()*+?{}]|").find(c) != std::u32string_view::npos) fail();
      set->add(c, c);
    }
    set->finish();
  }

  void member(CharacterSet* set, bool first) {
    if (left_.empty() || left_[0] == U'[' || left_.substr(0, 2) == U"&&" || (left_[0] == U'-' && !first)) fail();
    char32_t low = left_[0] == U'\\' ? escape(set) : next();
    if (low == 0 || left_.empty() || left_[0] != U'-') {
      if (low) set->add(low, low);
      return;
    }
    left_.remove_prefix(1);
    CharacterSet ignored;
    char32_t high = left_.empty() ? 0 : left_[0] == U'\\' ? escape(&ignored) : next();
    if (high < low || high == U']' || high == U'[') fail();
    set->add(low, high);
  }

  // The character that an escape stands for, which is added too, or 0 where it is a class.
  char32_t escape(CharacterSet* set) {
    left_.remove_prefix(1);
    if (left_.empty()) fail();
    char32_t c = next();
    if (c == U's' || c == U'S') {
      set->add_space(c == U's');
      return 0;
    }
    if (c == U'p') {
      kind(set);
      return 0;
    }
    static constexpr std::u32string_view kLetters = U"rnt", kMeant = U"\r\n\t";
    size_t which = kLetters.find(c);
    if (which != std::u32string_view::npos) {
      c = kMeant[which];
    } else if (c >= 128 || c <= 32 || kind_of(c) == 1 || kind_of(c) == 2 || kind_of(c) == kNumber) {
      fail();
    }
    set->add(c, c);
    return c;
  }

  void kind(CharacterSet* set) {
    size_t close = left_.find(U'}');
    if (!taken(U"{") || close == std::u32string_view::npos) fail();
    std::u32string_view name = left_.substr(0, close - 1);
    auto found =
        std::find_if(std::begin(kKinds), std::end(kKinds), [&](const auto& pair) { return pair.first == name; });
    if (found == std::end(kKinds)) fail();
    set->add_kinds(found->second);
    left_.remove_prefix(close);
  }

  static bool quantifies(char32_t c) { return c == U'?' || c == U'*' || c == U'+' || c == U'{'; }

  char32_t next() {
    char32_t c = left_[0];
    left_.remove_prefix(1);
    return c;
  }

  bool taken(std::u32string_view wanted) {
    if (left_.substr(0, wanted.size()) != wanted) return false;
    left_.remove_prefix(wanted.size());
    return true;
  }

  [[noreturn]] static void fail() { throw std::invalid_argument("a regular expression it does not know"); }

  std::u32string_view left_;
};

Expression::Expression(std::string_view pattern) { alternatives_ = Reader(characters(pattern)).alternatives(); }

// Matches at one place of a text after another, and gives up where that takes too long.
class Expression::Matcher {
 public:
  explicit Matcher(std::u32string_view text) : text_(text), budget_(kStepsPerCharacter * (text.size() + 1000)) {}

  // Where a match of `sequence` from its item `index` on ends that begins at `at`; text size + 1 if there is none.
  size_t end(const Sequence& sequence, size_t index, size_t at) {
    if (index == sequence.size()) return at;
    spend(1);
    const Item& item = sequence[index];
    if (item.kind == kNotBefore) {
      bool before = at < text_.size() && item.set.holds(text_[at]);
      return before ? none() : end(sequence, index + 1, at);
    }
    if (item.kind == kContraction) {
      size_t length = contraction(text_.substr(at));
      size_t found = length ? end(sequence, index + 1, at + length) : none();
      return found == none() && item.least == 0 ? end(sequence, index + 1, at) : found;
    }
    size_t count = 0;
    while (count < item.most && at + count < text_.size() && item.set.holds(text_[at + count])) ++count;
    spend(count);
    for (; count >= item.least; --count) {
      size_t found = end(sequence, index + 1, at + count);
      if (found != none() || count == 0) return found;
    }
    return none();
  }

  size_t none() const { return text_.size() + 1; }

 private:
  void spend(size_t steps) {
    if (steps > budget_) throw RequestError("prompt: the model's tokenizer cannot split this text in a sensible time");
    budget_ -= steps;
  }

  std::u32string_view text_;
  size_t budget_;
};

std::vector<std::u32string_view> Expression::pieces(std::u32string_view text) const {
  std::vector<std::u32string_view> out;
  Matcher matcher(text);
  size_t from = 0;
  for (size_t at = 0; at < text.size();) {
    size_t end = matcher.none();
    for (const Sequence& sequence : alternatives_) {
      end = matcher.end(sequence, 0, at);
      if (end != matcher.none()) break;
    }
    if (end == matcher.none()) {
      ++at;
      continue;
    }
    if (from < at) out.push_back(text.substr(from, at - from));
    out.push_back(text.substr(at, end - at));
    from = at = end;
  }
  if (from < text.size()) out.push_back(text.substr(from));
  return out;
}

}  // namespace llmc
