// UTF-8: whether bytes are it, one character at a time, and bytes that arrive piece by piece.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

void append_utf8(char32_t character, std::string* out);

bool is_utf8(std::string_view bytes);

// The characters of a text that is_utf8.
std::u32string characters(std::string_view text);

// Turns bytes into text: a started character is kept until it is complete, and bytes that are no UTF-8 become U+FFFD,
// one for each longest piece that could have begun a character (Unicode 15, 3.9, as Python's decoder).
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);
  std::string finish();

 private:
  std::string held_;
};

}  // namespace llmc
