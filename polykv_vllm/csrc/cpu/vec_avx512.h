// SPDX-License-Identifier: Apache-2.0
// The operations of vec_scalar.h on AVX-512 registers. Include between simd_begin and
// simd_end, after every standard header.
#pragma once

namespace polykv {
namespace {

using VecF = __m512;
using VecI = __m512i;
using Mask = __mmask16;
inline Mask lane_mask(uint32_t bits) { return static_cast<Mask>(bits); }

inline int32_t bits_of(float x) {
  return _mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(x)));
}
inline float float_of(int32_t x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x)));
}

inline VecF set1(float x) { return _mm512_set1_ps(x); }
inline VecF load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, VecF a) { _mm512_storeu_ps(p, a); }
inline VecI load_i(const int32_t* p) { return _mm512_loadu_si512(p); }
inline VecF add(VecF a, VecF b) { return _mm512_add_ps(a, b); }
inline VecF sub(VecF a, VecF b) { return _mm512_sub_ps(a, b); }
inline VecF mul(VecF a, VecF b) { return _mm512_mul_ps(a, b); }
inline VecF div(VecF a, VecF b) { return _mm512_div_ps(a, b); }
inline VecF fma(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
inline VecF max(VecF a, VecF b) { return _mm512_max_ps(a, b); }
inline VecF min(VecF a, VecF b) { return _mm512_min_ps(a, b); }
inline VecF abs(VecF a) { return _mm512_abs_ps(a); }
inline VecF select(Mask m, VecF yes, VecF no) {
  return _mm512_mask_blend_ps(m, no, yes);
}
inline Mask greater(VecF a, VecF b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
template <int kDistance>
inline VecF swap_lanes(VecF a) {
  if constexpr (kDistance == 8) return _mm512_shuffle_f32x4(a, a, 0x4e);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(a, a, 0xb1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(a, 0x4e);
  return _mm512_permute_ps(a, 0xb1);
}
inline float first(VecF a) { return _mm512_cvtss_f32(a); }
inline VecI add_where(Mask m, VecI a, VecI b) {
  return _mm512_mask_add_epi32(a, m, a, b);
}
inline VecI add_i(VecI a, VecI b) { return _mm512_add_epi32(a, b); }
template <int kShift>
inline VecI shift_left(VecI a) {
  return _mm512_slli_epi32(a, kShift);
}
template <int kShift>
inline VecI shift_right(VecI a) {
  return _mm512_srai_epi32(a, kShift);
}
inline VecI sub_i(VecI a, VecI b) { return _mm512_sub_epi32(a, b); }
inline VecI max_i(VecI a, VecI b) { return _mm512_max_epi32(a, b); }
inline void store_i(int32_t* p, VecI a) { _mm512_storeu_si512(p, a); }
inline VecI set1_i(int32_t x) { return _mm512_set1_epi32(x); }
inline VecF to_float(VecI a) { return _mm512_cvtepi32_ps(a); }
inline VecI to_int(VecF a) { return _mm512_cvtps_epi32(a); }
inline VecF as_float(VecI a) { return _mm512_castsi512_ps(a); }
inline VecI as_int(VecF a) { return _mm512_castps_si512(a); }
inline VecF load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline VecF load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_fp16(uint16_t* p, VecF a) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p),
      _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_i8(int8_t* p, VecI a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
}
inline void store_u16_split(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  const __m512 magic = _mm512_set1_ps(8388608.0f);
  __m512i p[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    p[i] = _mm512_castps_si512(_mm512_fmadd_ps(x[i], unit, magic));
  }
  // Lane i of `h` collects the high bytes of token i of p[0], p[2], p[1], p[3]; `l` the
  // low ones. Transposing 4 x 4 bytes puts the tokens beside each other.
  const __m512i even = _mm512_set1_epi16(255);
  const __m512i a =
      _mm512_mask_blend_epi16(0xaaaaaaaa, p[0], _mm512_slli_epi32(p[1], 16));
  const __m512i b =
      _mm512_mask_blend_epi16(0xaaaaaaaa, p[2], _mm512_slli_epi32(p[3], 16));
  // 0xca selects: mask ? second : third.
  const __m512i h = _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(a, 8), b, 0xca);
  const __m512i l = _mm512_ternarylogic_epi32(even, a, _mm512_slli_epi16(b, 8), 0xca);
  const __m512i bytes = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(high,
                      _mm512_permutexvar_epi32(order, _mm512_shuffle_epi8(h, bytes)));
  _mm512_storeu_si512(low,
                      _mm512_permutexvar_epi32(order, _mm512_shuffle_epi8(l, bytes)));
}
// As in vec_avx2.h, for products of int16.
inline void store_u16_pairs(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  const __m512 magic = _mm512_set1_ps(8388608.0f);
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15));
  const __m512i quads = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i bias = _mm512_set1_epi16(INT16_MIN);
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const __m512i a = _mm512_castps_si512(_mm512_fmadd_ps(x[i], unit, magic));
    const __m512i b = _mm512_castps_si512(_mm512_fmadd_ps(x[i + 1], unit, magic));
    const __m512i both =
        _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
    const __m512i ordered =
        _mm512_permutexvar_epi64(quads, _mm512_shuffle_epi8(both, order));
    _mm512_storeu_si512(i == 0 ? high : low, _mm512_xor_si512(ordered, bias));
  }
}
inline void store_u8(uint8_t* out, const VecF x[4], VecF unit) {
  const __m512 magic = _mm512_set1_ps(8388608.0f);
  for (int i = 0; i < 4; ++i) {
    const __m512i p = _mm512_castps_si512(_mm512_fmadd_ps(x[i], unit, magic));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * 16), _mm512_cvtepi32_epi8(p));
  }
}
inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace
}  // namespace polykv
