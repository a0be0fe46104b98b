// SPDX-License-Identifier: Apache-2.0
// The operations of vec_scalar.h on four NEON registers.
#pragma once

namespace polykv {
namespace {

struct VecF {
  float32x4_t v[4];
};
struct VecI {
  int32x4_t v[4];
};
// All bits of a lane are set, or none.
struct Mask {
  uint32x4_t v[4];
};

// Applied to each register; constants, so that they stay registers.
template <typename Fn>
inline VecF map_f(Fn fn) {
  return {{fn(0), fn(1), fn(2), fn(3)}};
}
template <typename Fn>
inline VecI map_i(Fn fn) {
  return {{fn(0), fn(1), fn(2), fn(3)}};
}

inline int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline Mask lane_mask(uint32_t bits) {
  const uint32x4_t all = vdupq_n_u32(bits), first = {1, 2, 4, 8};
  return {{vtstq_u32(all, first), vtstq_u32(all, vshlq_n_u32(first, 4)),
           vtstq_u32(all, vshlq_n_u32(first, 8)),
           vtstq_u32(all, vshlq_n_u32(first, 12))}};
}

inline VecF set1(float x) {
  return map_f([=](int) { return vdupq_n_f32(x); });
}
inline VecF load(const float* p) {
  return map_f([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, VecF a) {
  vst1q_f32(p, a.v[0]);
  vst1q_f32(p + 4, a.v[1]);
  vst1q_f32(p + 8, a.v[2]);
  vst1q_f32(p + 12, a.v[3]);
}
inline VecI load_i(const int32_t* p) {
  return map_i([=](int i) { return vld1q_s32(p + 4 * i); });
}
inline void store_i(int32_t* p, VecI a) {
  vst1q_s32(p, a.v[0]);
  vst1q_s32(p + 4, a.v[1]);
  vst1q_s32(p + 8, a.v[2]);
  vst1q_s32(p + 12, a.v[3]);
}
inline VecF add(VecF a, VecF b) {
  return map_f([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline VecF sub(VecF a, VecF b) {
  return map_f([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline VecF mul(VecF a, VecF b) {
  return map_f([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline VecF div(VecF a, VecF b) {
  return map_f([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline VecF fma(VecF a, VecF b, VecF c) {
  return map_f([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// Not vmaxq: of a NaN and a number, the second operand is taken.
inline VecF max(VecF a, VecF b) {
  return map_f([&](int i) {
    return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  });
}
inline VecF min(VecF a, VecF b) {
  return map_f([&](int i) {
    return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  });
}
inline VecF abs(VecF a) {
  return map_f([&](int i) { return vabsq_f32(a.v[i]); });
}
inline VecF select(Mask m, VecF yes, VecF no) {
  return map_f([&](int i) { return vbslq_f32(m.v[i], yes.v[i], no.v[i]); });
}
inline Mask greater(VecF a, VecF b) {
  const auto fn = [&](int i) { return vcgtq_f32(a.v[i], b.v[i]); };
  return {{fn(0), fn(1), fn(2), fn(3)}};
}
template <int kDistance>
inline VecF swap_lanes(VecF a) {
  return map_f([&](int i) {
    if constexpr (kDistance >= 4) return a.v[i ^ (kDistance / 4)];
    if constexpr (kDistance == 2) return vextq_f32(a.v[i], a.v[i], 2);
    return vrev64q_f32(a.v[i]);
  });
}
inline float first(VecF a) { return vgetq_lane_f32(a.v[0], 0); }
inline VecI add_i(VecI a, VecI b) {
  return map_i([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
inline VecI add_where(Mask m, VecI a, VecI b) {
  return map_i([&](int i) {
    return vaddq_s32(a.v[i], vandq_s32(b.v[i], vreinterpretq_s32_u32(m.v[i])));
  });
}
template <int kShift>
inline VecI shift_left(VecI a) {
  return map_i([&](int i) { return vshlq_n_s32(a.v[i], kShift); });
}
template <int kShift>
inline VecI shift_right(VecI a) {
  return map_i([&](int i) { return vshrq_n_s32(a.v[i], kShift); });
}
inline VecI sub_i(VecI a, VecI b) {
  return map_i([&](int i) { return vsubq_s32(a.v[i], b.v[i]); });
}
inline VecI max_i(VecI a, VecI b) {
  return map_i([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); });
}
inline VecI set1_i(int32_t x) {
  return map_i([=](int) { return vdupq_n_s32(x); });
}
inline VecF to_float(VecI a) {
  return map_f([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
// The conversion saturates; out of range is INT_MIN here.
inline VecI to_int(VecF a) {
  const float32x4_t limit = vdupq_n_f32(2147483648.0f);
  const int32x4_t outside = vdupq_n_s32(INT32_MIN);
  return map_i([&](int i) {
    const uint32x4_t inside = vandq_u32(vcgeq_f32(a.v[i], vnegq_f32(limit)),
                                        vcltq_f32(a.v[i], limit));
    return vbslq_s32(inside, vcvtnq_s32_f32(a.v[i]), outside);
  });
}
inline VecF as_float(VecI a) {
  return map_f([&](int i) { return vreinterpretq_f32_s32(a.v[i]); });
}
inline VecI as_int(VecF a) {
  return map_i([&](int i) { return vreinterpretq_s32_f32(a.v[i]); });
}
inline VecF load_bf16(const uint16_t* p) {
  return map_f([=](int i) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  });
}
inline VecF load_fp16(const uint16_t* p) {
  return map_f([=](int i) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  });
}
inline void store_fp16(uint16_t* p, VecF a) {
  for (int i = 0; i < 4; ++i) {
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
  }
}
inline void store_i8(int8_t* p, VecI a) {
  const int16x8_t lo = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
  const int16x8_t hi = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(lo), vqmovn_s16(hi)));
}
// x * unit to the nearest integer in 16 bits, as bytes: eight tokens, then eight.
struct Words {
  uint8x16_t lo, hi;
};
inline Words round_words(VecF x, VecF unit) {
  const VecF sum = fma(x, unit, set1(8388608.0f));
  const auto half = [&](int i) {
    return vreinterpretq_u8_u16(
        vuzp1q_u16(vreinterpretq_u16_f32(sum.v[i]), vreinterpretq_u16_f32(sum.v[i + 1])));
  };
  return {half(0), half(2)};
}
inline void store_u16_split(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Words words = round_words(x[i], unit);
    vst1q_u8(high + i * 16, vuzp2q_u8(words.lo, words.hi));
    vst1q_u8(low + i * 16, vuzp1q_u8(words.lo, words.hi));
  }
}
inline void store_u8(uint8_t* out, const VecF x[4], VecF unit) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Words words = round_words(x[i], unit);
    vst1q_u8(out + i * 16, vuzp1q_u8(words.lo, words.hi));
  }
}
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace polykv
