#include "errors.h"

namespace llmc {

std::string shown(const std::string& text) {
  constexpr size_t kMost = 300;
  std::string out = text.substr(0, kMost);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return text.size() > kMost ? out + "..." : out;
}

}  // namespace llmc
