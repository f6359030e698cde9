// SHA-256 (FIPS 180-4).

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace llmc {

// Goes through `count` blocks of 64 bytes.
using Sha256Blocks = void (*)(uint32_t* state, const unsigned char* data, size_t count);

void sha256_plain(uint32_t* state, const unsigned char* data, size_t count);
Sha256Blocks sha256_fastest();  // the CPU's own instructions, or sha256_plain

class Sha256 {
 public:
  explicit Sha256(Sha256Blocks blocks = sha256_fastest()) : blocks_(blocks) {}
  void update(const void* data, size_t bytes);
  std::string hex();  // of all that was given; nothing can be given after it

 private:
  Sha256Blocks blocks_;
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  unsigned char held_[64];
  uint64_t bytes_ = 0;
};

std::string sha256_hex(const void* data, size_t bytes);

}  // namespace llmc
