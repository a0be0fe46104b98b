// SPDX-License-Identifier: Apache-2.0
// Arithmetic shared by store and attention, over the lanes of the Vec in scope.
#pragma once

namespace polykv {
namespace {

constexpr float kInf = __builtin_inff();

// 2^x for x <= 0, relative error below 5e-6; exactly 1 at 0, at least 2^-126; NaN
// stays NaN. Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
inline VecF exp2(VecF x) {
  const VecF magic = set1(12582912.0f);
  x = max(set1(-126.0f), x);
  const VecF shifted = add(x, magic);
  const VecF f = sub(x, sub(shifted, magic));
  VecF p = fma(f, set1(9.58258435e-3f), set1(5.59054059e-2f));
  p = fma(p, f, set1(2.40240966e-1f));
  p = fma(p, f, set1(6.93124315e-1f));
  p = fma(p, f, set1(1.0f));
  return as_float(add_i(as_int(p), shift_left<23>(as_int(shifted))));
}

// tanh(x), relative error below 4e-7, NaN stays NaN: x P(x^2) / Q(x^2) with P and Q of
// degree 4, fitted to tanh(x) / x on [0, 9] for the least largest relative error
// (2e-8); beyond 9, tanh is 1 to within fp32. No difference of near numbers, as one by
// exp has.
inline VecF tanh(VecF x) {
  x = min(set1(9.0f), max(set1(-9.0f), x));
  const VecF t = mul(x, x);
  VecF p = fma(t, set1(1.33543523e-8f), set1(2.06088535e-5f));
  p = fma(p, t, set1(3.49557400e-3f));
  p = fma(p, t, set1(1.33810133e-1f));
  p = fma(p, t, set1(1.0f));
  VecF q = fma(t, set1(7.77642981e-7f), set1(3.28561175e-4f));
  q = fma(q, t, set1(2.58769281e-2f));
  q = fma(q, t, set1(4.67143297e-1f));
  q = fma(q, t, set1(1.0f));
  return div(mul(x, p), q);
}

// Lanes whose number has the bit `distance` set.
constexpr uint32_t upper_lanes(int distance) {
  return distance == 8   ? 0xff00
         : distance == 4 ? 0xf0f0
         : distance == 2 ? 0xcccc
                         : 0xaaaa;
}

// Reductions by halves: a fixed tree, so every instruction set rounds alike.
inline float reduce_add(VecF a) {
  a = add(a, swap_lanes<8>(a));
  a = add(a, swap_lanes<4>(a));
  a = add(a, swap_lanes<2>(a));
  return first(add(a, swap_lanes<1>(a)));
}
// Reduces sixteen rows at once: lane r of the result is what the functions above give
// for rows[r], bit for bit. Each level halves the number of vectors: two rows that
// reduced across `distance` share one vector, in lanes with that bit clear or set.
template <int kDistance, typename Op>
inline VecF combine(VecF a, VecF b, Op op) {
  const VecF x = op(a, swap_lanes<kDistance>(a)), y = op(b, swap_lanes<kDistance>(b));
  return select(lane_mask(upper_lanes(kDistance)), y, x);
}
template <typename Op>
inline VecF reduce_rows(const VecF rows[16], Op op) {
  VecF v8[8], v4[4];
  for (int i = 0; i < 8; ++i) v8[i] = combine<8>(rows[i], rows[i + 8], op);
  for (int i = 0; i < 4; ++i) v4[i] = combine<4>(v8[i], v8[i + 4], op);
  const VecF even = combine<2>(v4[0], v4[2], op), odd = combine<2>(v4[1], v4[3], op);
  return combine<1>(even, odd, op);
}
inline VecF reduce_add_rows(const VecF rows[16]) {
  return reduce_rows(rows, [](VecF a, VecF b) { return add(a, b); });
}
inline VecF reduce_max_rows(const VecF rows[16]) {
  return reduce_rows(rows, [](VecF a, VecF b) { return max(a, b); });
}

template <int kDistance>
inline VecF butterfly(VecF a) {
  return add(swap_lanes<kDistance>(a),
             select(lane_mask(upper_lanes(kDistance)), sub(set1(0.0f), a), a));
}

template <int kVectors, int kDistance>
inline void fwht_stages(VecF (&v)[kVectors]) {
  if constexpr (kDistance > 0) {
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) {
      if (i & kDistance) continue;
      const VecF a = v[i], b = v[i + kDistance];
      v[i] = add(a, b);
      v[i + kDistance] = sub(a, b);
    }
    fwht_stages<kVectors, kDistance / 2>(v);
  }
}

// Unnormalised Walsh-Hadamard transform in natural (Sylvester) order of a power of two
// of elements, in place. The stages run from the widest to the narrowest distance.
template <int B>
inline void fwht(float* x) {
  constexpr int kVectors = B / 16;
  VecF v[kVectors];
#pragma GCC unroll 32
  for (int i = 0; i < kVectors; ++i) v[i] = load(x + 16 * i);
  fwht_stages<kVectors, kVectors / 2>(v);
#pragma GCC unroll 32
  for (int i = 0; i < kVectors; ++i) {
    store(x + 16 * i, butterfly<1>(butterfly<2>(butterfly<4>(butterfly<8>(v[i])))));
  }
}

// A rotation of D elements is one Hadamard matrix, or where D is no power of two one
// after the other for the powers of two that D is a sum of, the widest first.
constexpr int widest_block(int head_dim) {
  int block = 16;
  while (2 * block <= head_dim) block *= 2;
  return block;
}
// b^-0.5 of the blocks there are, rounded once.
constexpr float block_norm(int b) {
  return b == 16    ? 0.25f
         : b == 32  ? 0.17677669529663687f
         : b == 64  ? 0.125f
         : b == 128 ? 0.088388347648318447f
         : b == 256 ? 0.0625f
                    : 0.044194173824159223f;
}
// (widest / b)^0.5: brings a block to the norm of the widest one.
constexpr float block_weight(int widest, int b) {
  const int ratio = widest / b;
  return ratio == 2 ? 1.4142135623730951f : ratio == 4 ? 2.0f : 2.8284271247461903f;
}

template <int N>
inline void multiply(float* x, float factor) {
  for (int i = 0; i < N; i += 16) store(x + i, mul(load(x + i), set1(factor)));
}

// The rotation times the square root of the widest block.
template <int D, int kWidest = widest_block(D)>
inline void rotate_unnormalized(float* x) {
  constexpr int kBlock = widest_block(D);
  fwht<kBlock>(x);
  if constexpr (kBlock < kWidest) {
    multiply<kBlock>(x, block_weight(kWidest, kBlock));
  }
  if constexpr (kBlock < D) rotate_unnormalized<D - kBlock, kWidest>(x + kBlock);
}

template <int D>
inline void rotate(float* x) {
  constexpr int kBlock = widest_block(D);
  fwht<kBlock>(x);
  multiply<kBlock>(x, block_norm(kBlock));
  if constexpr (kBlock < D) rotate<D - kBlock>(x + kBlock);
}

// Lane-wise sums of squares: a tree in each block, the last two blocks first.
template <int D>
inline VecF sum_squares(const float* x) {
  constexpr int kBlock = widest_block(D);
  VecF squares[kBlock / 16];
  for (int i = 0; i < kBlock / 16; ++i) {
    squares[i] = mul(load(x + 16 * i), load(x + 16 * i));
  }
  for (int h = kBlock / 32; h > 0; h /= 2) {
    for (int i = 0; i < h; ++i) squares[i] = add(squares[i], squares[i + h]);
  }
  if constexpr (kBlock < D) {
    return add(squares[0], sum_squares<D - kBlock>(x + kBlock));
  }
  return squares[0];
}

// Calls fn with the head dimension as a constant.
template <typename Fn, int... I>
inline void with_head_dim(int head_dim, std::integer_sequence<int, I...>, Fn fn) {
  ((head_dim == kHeadDims[I] ? (fn(std::integral_constant<int, kHeadDims[I]>{}), true)
                             : false) ||
   ...);
}
template <typename Fn>
inline void with_head_dim(int head_dim, Fn fn) {
  with_head_dim(head_dim, std::make_integer_sequence<int, kNumHeadDims>{}, fn);
}

template <int D>
inline void subtract(float* row, const float* other) {
  for (int i = 0; i < D; i += 16) store(row + i, sub(load(row + i), load(other + i)));
}

// But for its centers, which come first, and matrices, which several rows share
// (dense-inl.h).
template <int D>
inline void transform_row(float* row, const RowTransform& transform, int64_t kv_head) {
  if (transform.multipliers) {
    const float* multipliers = transform.multipliers + kv_head * D;
    for (int i = 0; i < D; i += 16) {
      store(row + i, mul(load(row + i), load(multipliers + i)));
    }
  }
  if (transform.rotate) rotate<D>(row);
}

// bf16 by truncation of the mantissa upwards (magnitude), for non-negative x.
inline uint16_t bf16_round_up(float x) {
  return static_cast<uint16_t>((static_cast<uint32_t>(bits_of(x)) + 0xffff) >> 16);
}
// bf16, ties to even; NaN stays NaN.
inline uint16_t bf16_round(float x) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(x));
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float bf16_value(uint16_t h) {
  return float_of(static_cast<int32_t>(static_cast<uint32_t>(h) << 16));
}
constexpr uint16_t kBf16NaN = 0x7fc0;

// Converts `D` elements at `index` of an array of `dtype` to fp32.
template <int D>
inline void load_row(float* out, const void* base, int64_t index, DType dtype) {
  const auto* half = static_cast<const uint16_t*>(base) + index;
  const auto* single = static_cast<const float*>(base) + index;
  for (int i = 0; i < D; i += 16) {
    store(out + i, dtype == DType::kBFloat16  ? load_bf16(half + i)
                   : dtype == DType::kFloat16 ? load_fp16(half + i)
                                              : load(single + i));
  }
}

template <int D>
inline void store_row(void* base, int64_t index, DType dtype, const float* row) {
  auto* half = static_cast<uint16_t*>(base) + index;
  for (int i = 0; i < D; i += 16) {
    if (dtype == DType::kFloat32) {
      store(static_cast<float*>(base) + index + i, load(row + i));
    } else if (dtype == DType::kFloat16) {
      store_fp16(half + i, load(row + i));
    } else {
      for (int j = 0; j < 16; ++j) half[i + j] = bf16_round(row[i + j]);
    }
  }
}

// Largest magnitude as bits; >= 0x7f800000 tells of an inf or a NaN.
template <int D>
inline int32_t max_magnitude_bits(const float* x) {
  VecI best = set1_i(0);
  for (int i = 0; i < D; i += 16) best = max_i(best, as_int(abs(load(x + i))));
  alignas(64) int32_t lane[16];
  store_i(lane, best);
  int32_t largest = 0;
  for (int i = 0; i < 16; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}

inline int32_t reduce_add_i(VecI a) {
  alignas(64) int32_t lane[16];
  store_i(lane, a);
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += lane[i];
  return sum;
}

}  // namespace
}  // namespace polykv
