// SPDX-License-Identifier: Apache-2.0
// Rows times a matrix of their KV head, in fp32: calibrated transforms of keys and
// queries. Each output element is one chain of fused multiply-adds over ascending input
// elements, so a row's result depends neither on the rows beside it nor on the
// instruction set. A few rows share each load of the matrix.
#pragma once

namespace polykv {
namespace {

constexpr int kDenseRows = 4;

// rows[r] = rows[r] * matrix, matrix[input][output].
template <int D, int kRows>
inline void multiply_rows(const float* matrix, float* rows) {
  constexpr int kVectors = D % 32 == 0 ? 2 : 1;
  alignas(64) float out[kRows * D];
  for (int first = 0; first < D; first += 16 * kVectors) {
    VecF sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = set1(0.0f);
    }
    for (int i = 0; i < D; ++i) {
      const float* row = matrix + i * D + first;
      VecF m[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) m[v] = load(row + v * 16);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const VecF x = set1(rows[r * D + i]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(x, m[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        store(out + r * D + first + v * 16, sum[r][v]);
      }
    }
  }
  std::memcpy(rows, out, sizeof(out));
}

// Up to kDenseRows rows of one KV head.
template <int D>
inline void multiply_rows(const float* matrices, int64_t kv_head, float* rows,
                          int count) {
  const float* matrix = matrices + kv_head * D * D;
  if (count == kDenseRows) return multiply_rows<D, kDenseRows>(matrix, rows);
  for (int r = 0; r < count; ++r) multiply_rows<D, 1>(matrix, rows + r * D);
}

// Queries of tokens begin..end times their matrices -> fp32 [tokens, heads, D].
template <int D>
inline void transform_queries(const AttentionArgs& args, int64_t begin, int64_t end,
                              float* out) {
  const int64_t heads = args.num_heads, group = heads / args.cache.num_kv_heads;
  for (int64_t kv_head = 0; kv_head < args.cache.num_kv_heads; ++kv_head) {
    for (int64_t row = begin * group; row < end * group; row += kDenseRows) {
      const int64_t left = end * group - row;
      const int count = static_cast<int>(left < kDenseRows ? left : kDenseRows);
      alignas(64) float q[kDenseRows * D];
      const auto head = [&](int r) { return kv_head * group + (row + r) % group; };
      for (int r = 0; r < count; ++r) {
        load_row<D>(q + r * D, args.query,
                    (row + r) / group * args.query_token_stride +
                        head(r) * args.query_head_stride,
                    args.query_dtype);
      }
      multiply_rows<D>(args.query_transform.matrices, kv_head, q, count);
      for (int r = 0; r < count; ++r) {
        std::memcpy(out + ((row + r) / group * heads + head(r)) * D, q + r * D,
                    D * sizeof(float));
      }
    }
  }
}

}  // namespace
}  // namespace polykv
