// SPDX-License-Identifier: Apache-2.0
// The two integer products of attention. They are exact, so every instruction set
// agrees on them bit for bit.
#pragma once

namespace polykv {
namespace {

struct TileConfig {
  TileConfig() {}
};

// scores[term][t] = sum_d keys[t][d] * query[term][d]; keys [subtile][D/4][16][4].
template <int D>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, int32_t* scores, Prefetcher&) {
  for (int term = 0; term < 2; ++term) {
    for (int r = 0; r < shape.rows; ++r) {
      const int row = term * shape.low_row + r;
      for (int t = 0; t < shape.subtiles * kSubtileTokens; ++t) {
        const uint8_t* key = keys[t / kSubtileTokens] + t % kSubtileTokens * 4;
        int32_t sum = 0;
        for (int d = 0; d < D; ++d) {
          sum += key[d / 4 * 64 + d % 4] * query[row * D + d];
        }
        scores[row * kTileTokens + t] = sum;
      }
    }
  }
}

// acc[term][d] = sum_t prob[term][t] * levels[t][d]; levels [quad][D/16][16][4].
template <int D>
inline void gemm_pv(const GemmShape& shape, const uint8_t* prob, const int8_t* levels,
                    int32_t* acc, Prefetcher&) {
  for (int term = 0; term < 2; ++term) {
    for (int r = 0; r < shape.rows; ++r) {
      const int row = term * shape.low_row + r;
      std::memset(acc + row * D, 0, D * sizeof(int32_t));
      for (int t = 0; t < shape.subtiles * kSubtileTokens; ++t) {
        const int32_t p = prob[row * kTileTokens + t];
        const int8_t* level = levels + t / 4 * D * 4 + t % 4;
        for (int d = 0; d < D; ++d) acc[row * D + d] += p * level[d * 4];
      }
    }
  }
}

}  // namespace
}  // namespace polykv
