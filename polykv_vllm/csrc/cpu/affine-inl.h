// SPDX-License-Identifier: Apache-2.0
// Affine codes of a row: reference/lowbit.py's Affine step by step, same rounding.
#pragma once

namespace polykv {
namespace {

constexpr float kMaxBf16 = 3.3895313892515355e38f;
constexpr float kMaxFloat = 3.4028234663852886e38f;

struct AffineScale {
  uint16_t step, minimum;  // bf16
};

// How many elements have a magnitude above `bound`.
template <int D>
inline int count_above(const float* x, float bound) {
  VecI count = set1_i(0);
  for (int i = 0; i < D; i += 16) {
    count = add_where(greater(abs(load(x + i)), set1(bound)), count, set1_i(1));
  }
  return reduce_add_i(count);
}

// The largest magnitude of at most `bound`.
template <int D>
inline float largest_up_to(const float* x, float bound) {
  VecF best = set1(0.0f);
  for (int i = 0; i < D; i += 16) {
    const VecF size = abs(load(x + i));
    best = max(best, select(greater(size, set1(bound)), set1(0.0f), size));
  }
  alignas(64) float lane[16];
  store(lane, best);
  float largest = 0;
  for (int i = 0; i < 16; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}

// The magnitude of place `place` in ascending order, exact: bisects the bits of floats,
// which are ordered as floats are, and ends as soon as a bound has the right number of
// elements above it. `max_bits`: those of the row's largest magnitude.
template <int D>
inline float magnitude_at(const float* x, int place, int32_t max_bits) {
  const int above = D - 1 - place;
  int32_t low = -1, high = max_bits;  // more than `above` lie above low, not above high
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const int count = count_above<D>(x, float_of(middle));
    if (count == above) return largest_up_to<D>(x, float_of(middle));
    (count > above ? low : high) = middle;
  }
  return float_of(high);
}

struct Range {
  float minimum, maximum;
};

template <int D>
inline Range clip_row(float* x, float bound) {
  const VecF top = set1(bound), bottom = set1(-bound);
  VecF smallest = set1(kInf), largest = set1(-kInf);
  for (int i = 0; i < D; i += 16) {
    const VecF clipped = min(top, max(bottom, load(x + i)));
    store(x + i, clipped);
    smallest = min(clipped, smallest);
    largest = max(clipped, largest);
  }
  alignas(64) float low[16], high[16];
  store(low, smallest);
  store(high, largest);
  Range range{low[0], high[0]};
  for (int i = 1; i < 16; ++i) {
    range.minimum = low[i] < range.minimum ? low[i] : range.minimum;
    range.maximum = high[i] > range.maximum ? high[i] : range.maximum;
  }
  return range;
}

// Finite x -> bf16, not up to infinity.
inline uint16_t bf16_round_finite(float x) {
  x = x > kMaxBf16 ? kMaxBf16 : x < -kMaxBf16 ? -kMaxBf16 : x;
  return bf16_round(x);
}

// floor(x) for 0 <= x < 2^31.
inline VecI floor_to_int(VecF x) {
  const VecI nearest = to_int(x);
  return add_where(greater(to_float(nearest), x), nearest, set1_i(-1));
}

// Codes 0..2^bits - 1 of a row, which is overwritten. Elements are clipped to the
// magnitude of place `clip` in ascending order.
template <int D>
inline AffineScale quantize_affine(float* x, int32_t max_bits, int bits, int clip,
                                   int8_t* codes) {
  const float bound =
      clip < D - 1 ? magnitude_at<D>(x, clip, max_bits) : float_of(max_bits);
  const Range range = clip_row<D>(x, bound);
  const float levels = static_cast<float>((1 << bits) - 1);
  AffineScale scale;
  // Adding zero makes -0 the 0 that it equals.
  scale.minimum = bf16_round_finite(range.minimum + 0.0f);
  const float minimum = bf16_value(scale.minimum);
  const float span = (range.maximum + 0.0f) / levels - minimum / levels;
  scale.step = bf16_round_finite(span > 0 ? span : 0.0f);
  if (scale.step == 0) {
    std::memset(codes, 0, D);
    return scale;
  }
  const VecF step = set1(bf16_value(scale.step)), low = set1(minimum);
  const VecF half = set1(0.5f), zero = set1(0.0f), top = set1(levels);
  for (int i = 0; i < D; i += 16) {
    const VecF place = add(div(sub(load(x + i), low), step), half);
    store_i8(codes + i, floor_to_int(min(top, max(zero, place))));
  }
  return scale;
}

// The orthonormal rotation of rows of any finite size: an exact power of two
// keeps the sums of large rows in range. False: the row is below 2^-125 and counts as
// zero.
template <int D>
inline bool rotate_any(float* x, int32_t max_bits) {
  const int32_t exponent = max_bits >> 23;
  if (exponent <= 1) return false;
  const VecF power = set1(float_of((255 - exponent) << 23));
  const VecF back = set1(float_of((exponent - 1) << 23));
  for (int i = 0; i < D; i += 16) store(x + i, mul(load(x + i), power));
  rotate<D>(x);
  const VecF top = set1(kMaxFloat), bottom = set1(-kMaxFloat);
  for (int i = 0; i < D; i += 16) {
    store(x + i, min(top, max(bottom, mul(load(x + i), back))));
  }
  return true;
}

}  // namespace
}  // namespace polykv
