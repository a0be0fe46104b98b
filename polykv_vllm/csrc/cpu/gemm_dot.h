// SPDX-License-Identifier: Apache-2.0
// gemm_scalar.h with dot products of four unsigned and four signed bytes per lane
// (vpdpbusd, usdot). Where both sides have to be signed (sdot), the unsigned one is
// taken less kDotBias, and the sums begin with what that lacks.
#pragma once

namespace polykv {
namespace {

constexpr int kHeadDimStep = 16;  // head dimensions served here are multiples of it

struct TileConfig {
  TileConfig() {}
};

inline void store_prob(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  store_u16_split(high, low, x, unit);
}

// kDotBias * the sum of the codes of a query row.
template <int D>
inline Reg query_start(const int8_t* query) {
  int32_t sum = 0;
  for (int d = 0; d < D; ++d) sum += query[d];
  sum *= kDotBias;
  return broadcast4(&sum);
}

// Each broadcast of four query codes serves S subtiles of keys. `row` and `token` say
// where the block lies; the pointers are at its first row and subtile.
template <int D, int R, int S, typename Sink>
inline void qk_block(const int8_t* high, const int8_t* low, const uint8_t* const* keys,
                     int row, int token, Sink sink) {
  constexpr int C = S * kGroupRegs;
  Accumulators<2, R, C> acc;
  acc.fill([&](auto t, auto r, auto) {
    return kDotBias == 0 ? zero_reg() : query_start<D>((t == 0 ? high : low) + r * D);
  });
  int groups = D / 4;
  // A trip count that GCC 12 knows makes it spill every sum in every step.
  asm volatile("" : "+r"(groups));
  for (int g = 0; g < groups; ++g) {
    Reg key[C];
    unrolled<C>([&](auto c) {
      key[c] = dot_operand(
          load_reg(keys[c / kGroupRegs] + g * 64 + c % kGroupRegs * kRegBytes));
    });
    unrolled<R>([&](auto r) {
      const Reg query[2] = {broadcast4(high + r * D + g * 4),
                            broadcast4(low + r * D + g * 4)};
      unrolled<C>([&](auto c) {
        unrolled<2>([&](auto t) {
          acc.sum[t][r][c] = dot(acc.sum[t][r][c], key[c], query[t]);
        });
      });
    });
  }
  acc.drain(row, token, sink);
}

template <int D, typename Sink>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, Prefetcher& prefetcher, Sink sink) {
  constexpr int S = kGroupRegs == 1 ? 2 : 1;  // subtiles per block
  by_rows<kDotRows>(shape.rows, [&](auto count, int row) {
    const int8_t* high = query + row * D;
    const int8_t* low = high + shape.low_row * D;
    int s = 0;
    for (; s + S <= shape.subtiles; s += S) {
      prefetcher.step();
      qk_block<D, count, S>(high, low, keys + s, row, s * 16, sink);
    }
    if (s < shape.subtiles) {
      qk_block<D, count, 1>(high, low, keys + s, row, s * 16, sink);
    }
  });
}

// kDotBias * the sum of a dim's levels.
template <int D>
inline void value_start(const int8_t* levels, int quads, int32_t* out) {
  for (int d = 0; d < D; d += kRegLanes) {
    Reg sum = zero_reg();
    for (int quad = 0; quad < quads; ++quad) {
      sum = dot(sum, set1_byte(1), load_reg(levels + (quad * D + d) * 4));
    }
    store_reg(out + d, sum);
    for (int lane = 0; lane < kRegLanes; ++lane) out[d + lane] *= kDotBias;
  }
}

// Weighted values of R rows and C registers of dims from `dim` on.
template <int D, int T, int R, int C, typename Sink>
inline void pv_block(const GemmShape& shape, const uint8_t* prob, int row,
                     const int8_t* levels, const int32_t* start, int dim, Sink sink) {
  const uint8_t* high = prob + row * kTileTokens;
  const uint8_t* low = prob + (row + shape.low_row) * kTileTokens;
  Accumulators<T, R, C> acc;
  acc.fill([&](auto, auto, auto c) {
    return kDotBias == 0 ? zero_reg() : load_reg(start + dim + c * kRegLanes);
  });
  for (int quad = 0; quad < shape.subtiles * 4; ++quad) {
    Reg level[C];
    unrolled<C>([&](auto c) {
      level[c] = load_reg(levels + (quad * D + dim) * 4 + c * kRegBytes);
    });
    unrolled<R>([&](auto r) {
      unrolled<T>([&](auto t) {
        const Reg p = dot_operand(
            broadcast4((t == 0 ? high : low) + r * kTileTokens + quad * 4));
        unrolled<C>(
            [&](auto c) { acc.sum[t][r][c] = dot(acc.sum[t][r][c], p, level[c]); });
      });
    });
  }
  acc.drain(row, dim, sink);
}

template <int D, int T, int R, typename Sink>
inline void pv_rows(const GemmShape& shape, const uint8_t* prob, int row,
                    const int8_t* levels, const int32_t* start, Prefetcher& prefetcher,
                    Sink sink) {
  constexpr int C = T == 1 ? kOneTermRegs : kTwoTermRegs;
  constexpr int kRest = D / kRegLanes % C;
  int dim = 0;
  for (; dim + C * kRegLanes <= D; dim += C * kRegLanes) {
    prefetcher.step();
    pv_block<D, T, R, C>(shape, prob, row, levels, start, dim, sink);
  }
  if constexpr (kRest > 0) {
    pv_block<D, T, R, kRest>(shape, prob, row, levels, start, dim, sink);
  }
}

template <int D, int kTerms, typename Sink>
inline void gemm_pv(const GemmShape& shape, const uint8_t* prob, const int8_t* levels,
                    Prefetcher& prefetcher, Sink sink) {
  alignas(64) int32_t start[D];
  if constexpr (kDotBias != 0) value_start<D>(levels, shape.subtiles * 4, start);
  by_rows<kDotRows>(shape.rows, [&](auto count, int row) {
    pv_rows<D, kTerms, count>(shape, prob, row, levels, start, prefetcher, sink);
  });
}

}  // namespace
}  // namespace polykv
