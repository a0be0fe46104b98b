// SPDX-License-Identifier: Apache-2.0
// The two integer products of attention. They are exact, so every instruction set
// agrees on them bit for bit. Results leave in vectors of 16, both terms at once:
// sink(row, first token or dim, high term, low term); of one row in ascending order.
#pragma once

namespace polykv {
namespace {

constexpr int kHeadDimStep = 16;  // head dimensions served here are multiples of it

struct TileConfig {
  TileConfig() {}
};

// Probabilities of 64 tokens, as gemm_pv takes them.
inline void store_prob(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  store_u16_split(high, low, x, unit);
}

// sum_d keys[t][d] * query[term][d] for 16 tokens; keys [D/4][16][4].
template <int D>
inline VecI subtile_scores(const int8_t* query, const uint8_t* keys) {
  VecI sum = set1_i(0);
  for (int t = 0; t < kSubtileTokens; ++t) {
    for (int d = 0; d < D; ++d) {
      sum.lane[t] += keys[d / 4 * 64 + t * 4 + d % 4] * query[d];
    }
  }
  return sum;
}

template <int D, typename Sink>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, Prefetcher&, Sink sink) {
  for (int r = 0; r < shape.rows; ++r) {
    for (int s = 0; s < shape.subtiles; ++s) {
      sink(r, s * kSubtileTokens, subtile_scores<D>(query + r * D, keys[s]),
           subtile_scores<D>(query + (r + shape.low_row) * D, keys[s]));
    }
  }
}

// sum_t prob[term][t] * levels[t][d] for 16 dims; levels [quad][D/16][16][4].
template <int D>
inline VecI group_values(const uint8_t* prob, const int8_t* levels, int tokens) {
  VecI sum = set1_i(0);
  for (int t = 0; t < tokens; ++t) {
    const int8_t* level = levels + t / 4 * D * 4 + t % 4;
    for (int d = 0; d < 16; ++d) sum.lane[d] += prob[t] * level[d * 4];
  }
  return sum;
}

template <int D, int kTerms, typename Sink>
inline void gemm_pv(const GemmShape& shape, const uint8_t* prob, const int8_t* levels,
                    Prefetcher&, Sink sink) {
  const int tokens = shape.subtiles * kSubtileTokens;
  for (int r = 0; r < shape.rows; ++r) {
    const uint8_t* high = prob + r * kTileTokens;
    const uint8_t* low = high + shape.low_row * kTileTokens;
    for (int d = 0; d < D; d += 16) {
      sink(r, d, group_values<D>(high, levels + d * 4, tokens),
           kTerms == 2 ? group_values<D>(low, levels + d * 4, tokens) : set1_i(0));
    }
  }
}

}  // namespace
}  // namespace polykv
