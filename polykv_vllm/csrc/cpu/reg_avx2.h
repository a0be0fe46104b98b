// SPDX-License-Identifier: Apache-2.0
// One AVX2 register of bytes or integers, for unpack_bytes.h and the products.
#pragma once

namespace polykv {
namespace {

using Reg = __m256i;
constexpr int kRegBytes = 32;
constexpr int kRegLanes = 8;  // of 32 bits
// Rows of a block: the sums and the operands fit in 16 registers.
constexpr int kDotRows = 3;
constexpr int kOneTermRegs = 2, kTwoTermRegs = 2;  // registers of values in gemm_dot.h
constexpr int kMaddRows = 4;

inline Reg load_reg(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_reg(void* p, Reg a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a);
}
inline Reg set1_byte(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
inline Reg set1_word(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
inline Reg zero_reg() { return _mm256_setzero_si256(); }
inline Reg broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}
inline Reg and_reg(Reg a, Reg b) { return _mm256_and_si256(a, b); }
inline Reg or_reg(Reg a, Reg b) { return _mm256_or_si256(a, b); }
inline Reg add_reg(Reg a, Reg b) { return _mm256_add_epi32(a, b); }
inline Reg add_words(Reg a, Reg b) { return _mm256_add_epi16(a, b); }
// Shifts of 16-bit words: `srl` fills with zeros, `sra` with the sign.
template <int kShift>
inline Reg sll(Reg a) {
  return _mm256_slli_epi16(a, kShift);
}
template <int kShift>
inline Reg srl(Reg a) {
  return _mm256_srli_epi16(a, kShift);
}
template <int kShift>
inline Reg sra(Reg a) {
  return _mm256_srai_epi16(a, kShift);
}
template <int kShift>
inline Reg sll_lanes(Reg a) {
  return _mm256_slli_epi32(a, kShift);
}
// Products of int16, summed in pairs to 32 bits.
inline Reg madd(Reg a, Reg b) { return _mm256_madd_epi16(a, b); }
// Sums of pairs of int8, as int16.
inline Reg pair_sums(Reg a) {
  return _mm256_maddubs_epi16(_mm256_set1_epi8(1), a);
}

#ifdef POLYKV_DOT
constexpr int kDotBias = 0;
inline Reg dot_operand(Reg a) { return a; }
inline Reg dot(Reg sum, Reg a, Reg b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#endif

// Sixteen int8 that `lookup` finds by the bytes of its second argument, all below 16.
inline Reg lookup_table(const int8_t* levels) {
  return _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels)));
}
inline Reg lookup(Reg table, Reg index) { return _mm256_shuffle_epi8(table, index); }

// Keys of a quad of tokens, [8 dims][4 tokens], from two rows [4 tokens][4 dims] that
// lie 64 bytes apart.
inline Reg load_quad_keys(const uint8_t* keys) {
  const __m128i bytes =
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto* first = reinterpret_cast<const __m128i*>(keys);
  const Reg rows = _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(first)), _mm_loadu_si128(first + 4), 1);
  return _mm256_shuffle_epi8(rows, _mm256_broadcastsi128_si256(bytes));
}

}  // namespace
}  // namespace polykv
