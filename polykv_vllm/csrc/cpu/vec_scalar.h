// SPDX-License-Identifier: Apache-2.0
// Sixteen lanes in plain C++: the specification of what the SIMD versions compute.
// Each operation rounds once per lane, so every instruction set gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace polykv {
namespace {

struct VecF {
  float lane[16];
};
struct VecI {
  int32_t lane[16];
};
using Mask = uint16_t;
// Lane i is bit i of `bits`.
inline Mask lane_mask(uint32_t bits) { return static_cast<Mask>(bits); }

template <typename Fn>
inline VecF map_f(Fn fn) {
  VecF out;
  for (int i = 0; i < 16; ++i) out.lane[i] = fn(i);
  return out;
}
template <typename Fn>
inline VecI map_i(Fn fn) {
  VecI out;
  for (int i = 0; i < 16; ++i) out.lane[i] = fn(i);
  return out;
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

inline VecF set1(float x) {
  return map_f([=](int) { return x; });
}
inline VecF load(const float* p) {
  return map_f([=](int i) { return p[i]; });
}
inline void store(float* p, VecF a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
inline VecI load_i(const int32_t* p) {
  return map_i([=](int i) { return p[i]; });
}
inline VecF add(VecF a, VecF b) {
  return map_f([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline VecF sub(VecF a, VecF b) {
  return map_f([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline VecF mul(VecF a, VecF b) {
  return map_f([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline VecF div(VecF a, VecF b) {
  return map_f([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline VecF fma(VecF a, VecF b, VecF c) {
  return map_f([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
// The second operand wins when a lane is unordered, as in x86's maxps.
inline VecF max(VecF a, VecF b) {
  return map_f([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline VecF min(VecF a, VecF b) {
  return map_f([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline VecF abs(VecF a) {
  return map_f([&](int i) { return std::fabs(a.lane[i]); });
}
inline VecF select(Mask m, VecF yes, VecF no) {
  return map_f([&](int i) { return (m >> i) & 1 ? yes.lane[i] : no.lane[i]; });
}
inline Mask greater(VecF a, VecF b) {
  Mask m = 0;
  for (int i = 0; i < 16; ++i) m |= Mask(a.lane[i] > b.lane[i]) << i;
  return m;
}
// Lane i takes lane i^kDistance.
template <int kDistance>
inline VecF swap_lanes(VecF a) {
  return map_f([&](int i) { return a.lane[i ^ kDistance]; });
}
inline float first(VecF a) { return a.lane[0]; }
// Adds b to the lanes in `m`.
inline VecI add_where(Mask m, VecI a, VecI b) {
  return map_i([&](int i) { return a.lane[i] + ((m >> i) & 1 ? b.lane[i] : 0); });
}
inline VecI add_i(VecI a, VecI b) {
  return map_i([&](int i) {
    return static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) +
                                static_cast<uint32_t>(b.lane[i]));
  });
}
template <int kShift>
inline VecI shift_left(VecI a) {
  return map_i([&](int i) {
    return static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) << kShift);
  });
}
// Arithmetic: the sign is kept.
template <int kShift>
inline VecI shift_right(VecI a) {
  return map_i([&](int i) { return a.lane[i] >> kShift; });
}
inline VecI sub_i(VecI a, VecI b) {
  return map_i([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline VecI max_i(VecI a, VecI b) {
  return map_i([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline void store_i(int32_t* p, VecI a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
inline VecI set1_i(int32_t x) {
  return map_i([=](int) { return x; });
}
inline VecF to_float(VecI a) {
  return map_f([&](int i) { return static_cast<float>(a.lane[i]); });
}
// Nearest integer, ties to even; out of range gives INT_MIN as on x86.
inline VecI to_int(VecF a) {
  return map_i([&](int i) {
    const float r = std::nearbyintf(a.lane[i]);
    return r >= -2147483648.0f && r < 2147483648.0f ? static_cast<int32_t>(r)
                                                    : INT32_MIN;
  });
}
inline VecF as_float(VecI a) {
  return map_f([&](int i) { return float_of(a.lane[i]); });
}
inline VecI as_int(VecF a) {
  return map_i([&](int i) { return bits_of(a.lane[i]); });
}
inline VecF load_bf16(const uint16_t* p) {
  return map_f([&](int i) {
    return float_of(static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16));
  });
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {
    const float x = std::ldexp(static_cast<float>(mantissa), -24);
    return float_of(bits_of(x) | static_cast<int32_t>(sign));
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return float_of(static_cast<int32_t>(sign | (wide << 23) | (mantissa << 13)));
}
inline VecF load_fp16(const uint16_t* p) {
  return map_f([&](int i) { return half_to_float(p[i]); });
}
inline uint16_t float_to_half(float x) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(x));
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds past 65504
  if (magnitude < 0x38800000) {                       // subnormal half
    const float scaled = float_of(static_cast<int32_t>(magnitude)) * 16777216.0f;
    return sign | static_cast<uint16_t>(std::nearbyintf(scaled));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}
inline void store_fp16(uint16_t* p, VecF a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.lane[i]);
}
// Two's complement bytes, saturated.
inline void store_i8(int8_t* p, VecI a) {
  for (int i = 0; i < 16; ++i) {
    const int32_t x = a.lane[i];
    p[i] = static_cast<int8_t>(x < -128 ? -128 : x > 127 ? 127 : x);
  }
}
// The high and low bytes of 64 numbers x * unit in 0..65535, to the nearest integer,
// ties to even. In a sum with 2^23 the integer is the low part of the bits; a NaN
// leaves some bytes or other.
inline void store_u16_split(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  for (int i = 0; i < 64; ++i) {
    const float sum = std::fma(x[i / 16].lane[i % 16], unit.lane[0], 8388608.0f);
    const int32_t bits = bits_of(sum);
    high[i] = static_cast<uint8_t>(bits >> 8);
    low[i] = static_cast<uint8_t>(bits);
  }
}
// The same of 64 numbers in 0..255, in one byte each.
inline void store_u8(uint8_t* out, const VecF x[4], VecF unit) {
  for (int i = 0; i < 64; ++i) {
    const float sum = std::fma(x[i / 16].lane[i % 16], unit.lane[0], 8388608.0f);
    out[i] = static_cast<uint8_t>(bits_of(sum));
  }
}
inline void prefetch(const void*) {}

}  // namespace
}  // namespace polykv
