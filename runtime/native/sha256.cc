#include "sha256.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace llmc {
namespace {

// First 32 bits of the fractions of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turned(uint32_t x, int by) { return (x >> by) | (x << (32 - by)); }

void plain_block(uint32_t* state, const unsigned char* data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t(data[4 * i]) << 24 | uint32_t(data[4 * i + 1]) << 16 | uint32_t(data[4 * i + 2]) << 8 |
           data[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    uint32_t s0 = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ (w[i - 15] >> 3);
    uint32_t s1 = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (int i = 0; i < 64; ++i) {
    uint32_t s1 = turned(e, 6) ^ turned(e, 11) ^ turned(e, 25);
    uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    uint32_t s0 = turned(a, 2) ^ turned(a, 13) ^ turned(a, 22);
    uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += sums[i];
}

#if defined(__x86_64__)

bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

// Two registers hold the state as the instructions want it: words a b e f and c d g h, the last one lowest.
__attribute__((target("sha,sse4.1"))) void instructed(uint32_t* state, const unsigned char* data, size_t count) {
  auto load = [](const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); };
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i cdab = _mm_shuffle_epi32(load(state), 0xB1), efgh = _mm_shuffle_epi32(load(state + 4), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
  for (; count; --count, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // four words each: those of rounds 4i, and what the next twelve rounds need
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(load(data + 16 * i), big_endian);
    for (int i = 0; i < 16; ++i) {
      __m128i added = _mm_add_epi32(w[i % 4], load(kRound + 4 * i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0E));
      __m128i seventh = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
      __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), seventh);
      w[i % 4] = _mm_sha256msg2_epu32(sum, w[(i + 3) % 4]);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#endif

}  // namespace

void sha256_plain(uint32_t* state, const unsigned char* data, size_t count) {
  for (; count; --count, data += 64) plain_block(state, data);
}

Sha256Blocks sha256_fastest() {
#if defined(__x86_64__)
  static const bool kHas = has_instructions();
  if (kHas) return instructed;
#endif
  return sha256_plain;
}

void Sha256::update(const void* data, size_t bytes) {
  const unsigned char* from = static_cast<const unsigned char*>(data);
  size_t held = bytes_ % 64;
  bytes_ += bytes;
  if (held) {
    size_t taken = std::min(bytes, 64 - held);
    std::memcpy(held_ + held, from, taken);
    if (held + taken < 64) return;
    blocks_(state_, held_, 1);
    from += taken;
    bytes -= taken;
  }
  blocks_(state_, from, bytes / 64);
  if (bytes % 64) std::memcpy(held_, from + bytes / 64 * 64, bytes % 64);
}

std::string Sha256::hex() {
  const uint64_t bits = bytes_ * 8;
  unsigned char tail[72] = {0x80};
  size_t padding = (bytes_ % 64 < 56 ? 56 : 120) - bytes_ % 64;
  for (int i = 0; i < 8; ++i) tail[padding + size_t(i)] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  update(tail, padding + 8);
  std::string out;
  for (uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[(word >> shift) & 15];
  }
  return out;
}

std::string sha256_hex(const void* data, size_t bytes) {
  Sha256 hash;
  hash.update(data, bytes);
  return hash.hex();
}

}  // namespace llmc
