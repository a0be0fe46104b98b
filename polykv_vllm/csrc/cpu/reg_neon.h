// SPDX-License-Identifier: Apache-2.0
// reg_avx2.h on NEON, and its dot products: usdot, or sdot with a biased left side.
#pragma once

namespace polykv {
namespace {

using Reg = int32x4_t;
constexpr int kRegBytes = 16;
constexpr int kRegLanes = 4;
// Rows of a block: the sums and the operands fit in 32 registers.
constexpr int kDotRows = 3;
constexpr int kOneTermRegs = 8, kTwoTermRegs = 4;  // registers of values in gemm_dot.h

inline uint8x16_t bytes_of(Reg a) { return vreinterpretq_u8_s32(a); }
inline uint16x8_t words_of(Reg a) { return vreinterpretq_u16_s32(a); }

inline Reg load_reg(const void* p) {
  return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}
inline void store_reg(void* p, Reg a) {
  vst1q_u8(static_cast<uint8_t*>(p), bytes_of(a));
}
inline Reg set1_byte(int x) {
  return vreinterpretq_s32_u8(vdupq_n_u8(static_cast<uint8_t>(x)));
}
inline Reg zero_reg() { return vdupq_n_s32(0); }
inline Reg broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return vdupq_n_s32(x);
}
inline Reg and_reg(Reg a, Reg b) { return vandq_s32(a, b); }
inline Reg or_reg(Reg a, Reg b) { return vorrq_s32(a, b); }
template <int kShift>
inline Reg sll(Reg a) {
  return vreinterpretq_s32_u16(vshlq_n_u16(words_of(a), kShift));
}
template <int kShift>
inline Reg srl(Reg a) {
  return vreinterpretq_s32_u16(vshrq_n_u16(words_of(a), kShift));
}

inline Reg lookup_table(const int8_t* levels) {
  return vreinterpretq_s32_s8(vld1q_s8(levels));
}
inline Reg lookup(Reg table, Reg index) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(bytes_of(table), bytes_of(index)));
}
// Here of four dims: one row.
inline Reg load_quad_keys(const uint8_t* keys) {
  const uint8x16_t order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(keys), order));
}

#ifdef POLYKV_I8MM
constexpr int kDotBias = 0;
inline Reg dot_operand(Reg a) { return a; }
inline Reg dot(Reg sum, Reg a, Reg b) {
  return vusdotq_s32(sum, bytes_of(a), vreinterpretq_s8_s32(b));
}
#else
constexpr int kDotBias = 128;
inline Reg dot_operand(Reg a) {
  return vreinterpretq_s32_u8(veorq_u8(bytes_of(a), vdupq_n_u8(kDotBias)));
}
inline Reg dot(Reg sum, Reg a, Reg b) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#endif

}  // namespace
}  // namespace polykv
