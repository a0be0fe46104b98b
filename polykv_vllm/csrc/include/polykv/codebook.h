// SPDX-License-Identifier: Apache-2.0
// The codebooks of formats/codebook.py; a test compares the two.
#pragma once

#include <cstdint>

#include "polykv/args.h"

namespace polykv {

template <int kBits>
struct Codebook;

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

// Sixteen int8 levels by code, repeated where codes have fewer than four bits. Those of
// affine values are symmetric, in half steps around the middle of the row's range: the
// sums over them stay small.
inline const int8_t* value_levels(const Format& format) {
  static constexpr int8_t kAffine[3][16] = {
      {-3, -1, 1, 3, -3, -1, 1, 3, -3, -1, 1, 3, -3, -1, 1, 3},
      {-7, -5, -3, -1, 1, 3, 5, 7, -7, -5, -3, -1, 1, 3, 5, 7},
      {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15}};
  static constexpr int8_t kThreeBits[16] = {-88, -55, -31, -10, 10, 31, 55, 88,
                                            -88, -55, -31, -10, 10, 31, 55, 88};
  if (format.value_quantizer == Quantizer::kAffine)
    return kAffine[format.value_bits - 2];
  return format.value_bits == 3 ? kThreeBits : Codebook<4>::kLevels;
}

// The j-th decision point in units of the row's standard deviation.
template <int kBits>
constexpr float boundary(int j) {
  using Book = Codebook<kBits>;
  return static_cast<float>((Book::kLevels[j] + Book::kLevels[j + 1]) * 0.5 /
                            Book::kUnit);
}

}  // namespace polykv
