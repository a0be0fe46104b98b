// SPDX-License-Identifier: Apache-2.0
// The codebooks of formats/codebook.py; a test compares the two.
#pragma once

#include <cstdint>

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

// The j-th decision point in units of the row's standard deviation.
template <int kBits>
constexpr float boundary(int j) {
  using Book = Codebook<kBits>;
  return static_cast<float>((Book::kLevels[j] + Book::kLevels[j + 1]) * 0.5 /
                            Book::kUnit);
}

}  // namespace polykv
