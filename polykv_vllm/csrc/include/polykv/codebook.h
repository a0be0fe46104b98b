// SPDX-License-Identifier: Apache-2.0
// The codebooks of formats/codebook.py; a test compares the two.
#pragma once

#include <cstdint>

#include "polykv/args.h"

namespace polykv {

template <int kBits>
struct Codebook;

template <>
struct Codebook<2> {
  static constexpr double kUnit = 79.47;
  static constexpr int8_t kLevels[4] = {-120, -36, 36, 120};
};

template <>
struct Codebook<3> {
  static constexpr double kUnit = 40.92;
  static constexpr int8_t kLevels[8] = {-88, -55, -31, -10, 10, 31, 55, 88};
};

template <>
struct Codebook<4> {
  static constexpr double kUnit = 44.55;
  static constexpr int8_t kLevels[16] = {-122, -92, -72, -56, -42, -29, -17, -6,
                                         6,    17,  29,  42,  56,  72,  92,  122};
};

// Sixteen levels by code, repeated where codes have fewer than four bits.
struct Levels {
  int8_t level[16];
};
template <int kBits>
constexpr Levels codebook_levels(int offset = 0) {
  Levels out{};
  for (int i = 0; i < 16; ++i) {
    const int level = Codebook<kBits>::kLevels[i % (1 << kBits)] + offset;
    out.level[i] = static_cast<int8_t>(static_cast<uint8_t>(level));
  }
  return out;
}

// Of values, int8. Those of affine values are symmetric, in half steps around the middle
// of the row's range: the sums over them stay small.
inline const int8_t* value_levels(const Format& format) {
  static constexpr Levels kAffine[3] = {
      {{-3, -1, 1, 3, -3, -1, 1, 3, -3, -1, 1, 3, -3, -1, 1, 3}},
      {{-7, -5, -3, -1, 1, 3, 5, 7, -7, -5, -3, -1, 1, 3, 5, 7}},
      {{-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15}}};
  static constexpr Levels kCodebook[3] = {codebook_levels<2>(), codebook_levels<3>(),
                                          codebook_levels<4>()};
  if (format.value_bits == 8) return kCodebook[0].level;  // codes are levels
  const bool affine = format.value_quantizer == Quantizer::kAffine;
  return (affine ? kAffine : kCodebook)[format.value_bits - 2].level;
}

// Of keys of 2 to 4 bits, unsigned: codes themselves, or levels above -128.
inline const uint8_t* key_levels(const Format& format) {
  static constexpr Levels kCodes = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
  static constexpr Levels kCodebook[3] = {
      codebook_levels<2>(128), codebook_levels<3>(128), codebook_levels<4>(128)};
  const bool affine = format.key_quantizer == Quantizer::kAffine;
  const Levels& levels = affine ? kCodes : kCodebook[format.key_bits - 2];
  return reinterpret_cast<const uint8_t*>(levels.level);
}

// What was added to signed key codes or levels to make them unsigned.
inline int key_bias(const Format& format) {
  return format.key_quantizer == Quantizer::kSymmetric ? 1 << (format.key_bits - 1)
                                                       : 128;
}

// The j-th decision point in units of the row's standard deviation.
template <int kBits>
constexpr float boundary(int j) {
  using Book = Codebook<kBits>;
  return static_cast<float>((Book::kLevels[j] + Book::kLevels[j + 1]) * 0.5 /
                            Book::kUnit);
}

}  // namespace polykv
