// SPDX-License-Identifier: Apache-2.0
// The operations of vec_scalar.h on pairs of AVX2 registers. Include after every
// standard header, between the pragmas that name the target.
#pragma once

namespace polykv {
namespace {

struct VecF {
  __m256 lo, hi;
};
struct VecI {
  __m256i lo, hi;
};
// All bits of a lane are set, or none.
struct Mask {
  __m256i lo, hi;
};

inline int32_t bits_of(float x) {
  return _mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(x)));
}
inline float float_of(int32_t x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x)));
}
inline const __m256i* as_reg(const void* p) {
  return reinterpret_cast<const __m256i*>(p);
}
inline __m256i* as_reg(void* p) { return reinterpret_cast<__m256i*>(p); }
inline __m128i load_half(const void* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// In vector comparisons of GCC, constants fold: such a mask costs nothing.
inline Mask lane_mask(uint32_t bits) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  const __m256i lo = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i hi = _mm256_setr_epi32(256, 512, 1024, 2048, 4096, 8192, 16384, 32768);
  return {_mm256_cmpeq_epi32(_mm256_and_si256(all, lo), lo),
          _mm256_cmpeq_epi32(_mm256_and_si256(all, hi), hi)};
}

inline VecF set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline VecF load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void store(float* p, VecF a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline VecI load_i(const int32_t* p) {
  return {_mm256_loadu_si256(as_reg(p)), _mm256_loadu_si256(as_reg(p + 8))};
}
inline VecF add(VecF a, VecF b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline VecF sub(VecF a, VecF b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline VecF mul(VecF a, VecF b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline VecF div(VecF a, VecF b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline VecF fma(VecF a, VecF b, VecF c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline VecF max(VecF a, VecF b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline VecF min(VecF a, VecF b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline VecF as_float(VecI a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
inline VecI as_int(VecF a) {
  return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
inline VecF abs(VecF a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
// Written as a vector's ?: and not as a blend, so that a constant mask becomes a
// constant blend, or nothing.
inline __m256 select_half(__m256i m, __m256 yes, __m256 no) {
  return (__m256)((__v8si)m < 0 ? (__v8sf)yes : (__v8sf)no);
}
inline VecF select(Mask m, VecF yes, VecF no) {
  return {select_half(m.lo, yes.lo, no.lo), select_half(m.hi, yes.hi, no.hi)};
}
inline Mask greater(VecF a, VecF b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
template <int kDistance>
inline VecF swap_lanes(VecF a) {
  if constexpr (kDistance == 8) return {a.hi, a.lo};
  if constexpr (kDistance == 4) {
    return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
  }
  constexpr int kOrder = kDistance == 2 ? 0x4e : 0xb1;
  return {_mm256_permute_ps(a.lo, kOrder), _mm256_permute_ps(a.hi, kOrder)};
}
inline float first(VecF a) { return _mm256_cvtss_f32(a.lo); }
inline VecI add_i(VecI a, VecI b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline VecI add_where(Mask m, VecI a, VecI b) {
  return add_i(a, {_mm256_and_si256(m.lo, b.lo), _mm256_and_si256(m.hi, b.hi)});
}
template <int kShift>
inline VecI shift_left(VecI a) {
  return {_mm256_slli_epi32(a.lo, kShift), _mm256_slli_epi32(a.hi, kShift)};
}
template <int kShift>
inline VecI shift_right(VecI a) {
  return {_mm256_srai_epi32(a.lo, kShift), _mm256_srai_epi32(a.hi, kShift)};
}
inline VecI sub_i(VecI a, VecI b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
inline VecI max_i(VecI a, VecI b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
inline void store_i(int32_t* p, VecI a) {
  _mm256_storeu_si256(as_reg(p), a.lo);
  _mm256_storeu_si256(as_reg(p + 8), a.hi);
}
inline VecI set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline VecF to_float(VecI a) {
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
inline VecI to_int(VecF a) {
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
inline __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16));
}
inline VecF load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline VecF load_fp16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))};
}
inline void store_fp16(uint16_t* p, VecF a) {
  constexpr int kRound = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  auto* out = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(out, _mm256_cvtps_ph(a.lo, kRound));
  _mm_storeu_si128(out + 1, _mm256_cvtps_ph(a.hi, kRound));
}
inline void store_i8(int8_t* p, VecI a) {
  // Packing works within halves of a register: 0-3, 8-11, 4-7, 12-15.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words),
                                   _mm256_extracti128_si256(words, 1)));
}
// x * unit to the nearest integer, in the low bits.
inline VecI round_small(VecF x, VecF unit) {
  return as_int(fma(x, unit, set1(8388608.0f)));
}
inline void store_u16_split(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  // Packing leaves fours of tokens 0, 2, 4, 6, 1, 3, 5, 7 in order of their halves.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i word = _mm256_set1_epi32(0xffff), byte = _mm256_set1_epi16(255);
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const VecI a = round_small(x[i], unit), b = round_small(x[i + 1], unit);
    const __m256i first = _mm256_packus_epi32(_mm256_and_si256(a.lo, word),
                                              _mm256_and_si256(a.hi, word));
    const __m256i second = _mm256_packus_epi32(_mm256_and_si256(b.lo, word),
                                               _mm256_and_si256(b.hi, word));
    const __m256i top = _mm256_packus_epi16(_mm256_srli_epi16(first, 8),
                                            _mm256_srli_epi16(second, 8));
    const __m256i bottom = _mm256_packus_epi16(_mm256_and_si256(first, byte),
                                               _mm256_and_si256(second, byte));
    _mm256_storeu_si256(as_reg(high + i * 16),
                        _mm256_permutevar8x32_epi32(top, order));
    _mm256_storeu_si256(as_reg(low + i * 16),
                        _mm256_permutevar8x32_epi32(bottom, order));
  }
}
// The same numbers less 32768 as int16: those of 32 tokens in place of the high bytes,
// of 32 in place of the low ones, four by four in the order 0, 2, 1, 3 (gemm_madd.h).
inline void store_u16_pairs(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15));
  const __m256i bias = _mm256_set1_epi16(INT16_MIN);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const VecI p = round_small(x[i], unit);
    const __m256i both = _mm256_blend_epi16(p.lo, _mm256_slli_epi32(p.hi, 16), 0xaa);
    const __m256i quads =
        _mm256_permute4x64_epi64(_mm256_shuffle_epi8(both, order), 0xd8);
    _mm256_storeu_si256(as_reg((i < 2 ? high : low) + i % 2 * 32),
                        _mm256_xor_si256(quads, bias));
  }
}
inline void store_u8(uint8_t* out, const VecF x[4], VecF unit) {
  const __m256i byte = _mm256_set1_epi32(255);
  for (int i = 0; i < 4; ++i) {
    const VecI p = round_small(x[i], unit);
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_and_si256(p.lo, byte), _mm256_and_si256(p.hi, byte)),
        0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * 16),
                     _mm_packus_epi16(_mm256_castsi256_si128(words),
                                      _mm256_extracti128_si256(words, 1)));
  }
}
inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace
}  // namespace polykv
