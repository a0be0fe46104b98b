// SPDX-License-Identifier: Apache-2.0
// reg_avx2.h on AVX-512, as far as the products need it.
#pragma once

namespace polykv {
namespace {

using Reg = __m512i;
constexpr int kRegBytes = 64;
constexpr int kRegLanes = 16;
// Rows of a block: the sums, the operands and the constants fit in 32 registers.
constexpr int kDotRows = 6;
constexpr int kOneTermRegs = 4, kTwoTermRegs = 2;  // registers of values in gemm_dot.h
constexpr int kMaddRows = 6;

inline Reg load_reg(const void* p) { return _mm512_loadu_si512(p); }
inline void store_reg(void* p, Reg a) { _mm512_storeu_si512(p, a); }
inline Reg set1_byte(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline Reg set1_word(int x) { return _mm512_set1_epi16(static_cast<short>(x)); }
inline Reg zero_reg() { return _mm512_setzero_si512(); }
inline Reg broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
inline Reg and_reg(Reg a, Reg b) { return _mm512_and_si512(a, b); }
inline Reg add_reg(Reg a, Reg b) { return _mm512_add_epi32(a, b); }
inline Reg add_words(Reg a, Reg b) { return _mm512_add_epi16(a, b); }
template <int kShift>
inline Reg sll(Reg a) {
  return _mm512_slli_epi16(a, kShift);
}
template <int kShift>
inline Reg srl(Reg a) {
  return _mm512_srli_epi16(a, kShift);
}
template <int kShift>
inline Reg sra(Reg a) {
  return _mm512_srai_epi16(a, kShift);
}
template <int kShift>
inline Reg sll_lanes(Reg a) {
  return _mm512_slli_epi32(a, kShift);
}
inline Reg madd(Reg a, Reg b) { return _mm512_madd_epi16(a, b); }
inline Reg pair_sums(Reg a) { return _mm512_maddubs_epi16(_mm512_set1_epi8(1), a); }

#ifdef POLYKV_DOT
constexpr int kDotBias = 0;
inline Reg dot_operand(Reg a) { return a; }
inline Reg dot(Reg sum, Reg a, Reg b) { return _mm512_dpbusd_epi32(sum, a, b); }
#endif

}  // namespace
}  // namespace polykv
