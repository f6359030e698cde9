#include "text.h"

namespace llmc {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";

// Table 3-7 of the Unicode standard: bytes of a character that begins so, and what its second byte may be.
struct Lead {
  int length;  // 0: nothing begins so
  unsigned char low, high;
};

Lead lead(unsigned char first) {
  if (first < 0x80) return {1, 0, 0};
  if (first >= 0xC2 && first <= 0xDF) return {2, 0x80, 0xBF};
  if (first == 0xE0) return {3, 0xA0, 0xBF};
  if (first == 0xED) return {3, 0x80, 0x9F};
  if (first >= 0xE1 && first <= 0xEF) return {3, 0x80, 0xBF};
  if (first == 0xF0) return {4, 0x90, 0xBF};
  if (first == 0xF4) return {4, 0x80, 0x8F};
  if (first >= 0xF1 && first <= 0xF3) return {4, 0x80, 0xBF};
  return {0, 0, 0};
}

// Bytes from `at` on that belong together; `whole`: they are a character, else the longest piece of one.
size_t piece(std::string_view bytes, size_t at, bool* whole) {
  Lead expected = lead(static_cast<unsigned char>(bytes[at]));
  *whole = false;
  if (expected.length == 0) return 1;
  size_t length = 1;
  while (length < size_t(expected.length) && at + length < bytes.size()) {
    unsigned char next = static_cast<unsigned char>(bytes[at + length]);
    unsigned char low = length == 1 ? expected.low : 0x80, high = length == 1 ? expected.high : 0xBF;
    if (next < low || next > high) return length;
    ++length;
  }
  *whole = length == size_t(expected.length);
  return length;
}

}  // namespace

void append_utf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    *out += char(c);
    return;
  }
  if (c < 0x800) {
    *out += char(0xC0 | (c >> 6));
  } else {
    if (c < 0x10000) {
      *out += char(0xE0 | (c >> 12));
    } else {
      *out += char(0xF0 | (c >> 18));
      *out += char(0x80 | ((c >> 12) & 63));
    }
    *out += char(0x80 | ((c >> 6) & 63));
  }
  *out += char(0x80 | (c & 63));
}

bool is_utf8(std::string_view bytes) {
  bool whole = true;
  for (size_t at = 0; at < bytes.size() && whole;) at += piece(bytes, at, &whole);
  return whole;
}

std::u32string characters(std::string_view text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    bool whole;
    size_t length = piece(text, at, &whole);
    unsigned char first = static_cast<unsigned char>(text[at]);
    char32_t c = length == 1 ? first : first & (0xFF >> (length + 1));
    for (size_t i = 1; i < length; ++i) c = (c << 6) | (static_cast<unsigned char>(text[at + i]) & 63);
    out += c;
    at += length;
  }
  return out;
}

std::string Utf8Stream::push(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < held_.size()) {
    bool whole;
    size_t length = piece(held_, at, &whole);
    bool more = !whole && at + length == held_.size() && lead(static_cast<unsigned char>(held_[at])).length > 0;
    if (more) break;
    out += whole ? std::string_view(held_).substr(at, length) : kReplacement;
    at += length;
  }
  held_.erase(0, at);
  return out;
}

std::string Utf8Stream::finish() {
  std::string out = held_.empty() ? "" : kReplacement;
  held_.clear();
  return out;
}

}  // namespace llmc
