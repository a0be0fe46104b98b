// SPDX-License-Identifier: Apache-2.0
// gemm_scalar.h with AVX-512 VNNI (vpdpbusd: 64 products of u8 and s8 per instruction).
#pragma once

namespace polykv {
namespace {

constexpr int kHeadDimStep = 16;  // head dimensions served here are multiples of it

struct TileConfig {
  TileConfig() {}
};

inline __m512i broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

// Calls fn(0), ..., fn(N - 1) with constants. A loop with a run-time index over the
// accumulators, even the one that clears them, makes GCC 12 keep the whole array on the
// stack; its unroll pragma comes too late to prevent it.
template <typename Fn, int... I>
inline void for_each_index(std::integer_sequence<int, I...>, Fn fn) {
  (fn(std::integral_constant<int, I>{}), ...);
}
template <int N, typename Fn>
inline void unrolled(Fn fn) {
  for_each_index(std::make_integer_sequence<int, N>{}, fn);
}

// Calls fn(count, row) for six rows at a time and then for what is left of them; the
// counts are constants.
template <typename Fn>
inline void by_rows(int rows, Fn fn) {
  int row = 0;
  for (; row + 6 <= rows; row += 6) fn(std::integral_constant<int, 6>{}, row);
  unrolled<5>([&](auto i) {
    constexpr int kCount = i + 1;
    if (rows - row == kCount) fn(std::integral_constant<int, kCount>{}, row);
  });
}

// Sums of R rows x C columns for one or both terms: T * R * C of the 32 registers.
template <int T, int R, int C>
struct Accumulators {
  __m512i sum[T][R][C];

  void clear() {
    unrolled<T>([&](auto t) {
      unrolled<R>([&](auto r) {
        unrolled<C>([&](auto c) { sum[t][r][c] = _mm512_setzero_si512(); });
      });
    });
  }

  // Hands the sums out through memory: a sink that takes them from the registers makes
  // GCC 12 keep them on the stack throughout the loop before.
  template <typename Sink>
  void drain(int row, int first, Sink sink) const {
    alignas(64) int32_t out[T][R][C][16];
    unrolled<T>([&](auto t) {
      unrolled<R>([&](auto r) {
        unrolled<C>([&](auto c) { _mm512_store_si512(out[t][r][c], sum[t][r][c]); });
      });
    });
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        sink(row + r, first + c * 16, load_i(out[0][r][c]),
             T == 2 ? load_i(out[T - 1][r][c]) : set1_i(0));
      }
    }
  }
};

// Each broadcast of four query codes serves S subtiles of keys. `row` and `token` say
// where the block lies; the pointers are at its first row and subtile.
template <int D, int R, int S, typename Sink>
inline void qk_block(const int8_t* high, const int8_t* low, const uint8_t* const* keys,
                     int row, int token, Sink sink) {
  Accumulators<2, R, S> acc;
  acc.clear();
  int groups = D / 4;
  // A trip count that GCC 12 knows makes it spill every sum in every step.
  asm volatile("" : "+r"(groups));
  for (int g = 0; g < groups; ++g) {
    __m512i key[S];
    unrolled<S>([&](auto s) { key[s] = _mm512_loadu_si512(keys[s] + g * 64); });
    unrolled<R>([&](auto r) {
      const __m512i query[2] = {broadcast4(high + r * D + g * 4),
                                broadcast4(low + r * D + g * 4)};
      unrolled<S>([&](auto s) {
        unrolled<2>([&](auto t) {
          acc.sum[t][r][s] = _mm512_dpbusd_epi32(acc.sum[t][r][s], key[s], query[t]);
        });
      });
    });
  }
  acc.drain(row, token, sink);
}

template <int D, typename Sink>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, Prefetcher& prefetcher, Sink sink) {
  by_rows(shape.rows, [&](auto count, int row) {
    const int8_t* high = query + row * D;
    const int8_t* low = high + shape.low_row * D;
    int s = 0;
    for (; s + 2 <= shape.subtiles; s += 2) {
      prefetcher.step();
      qk_block<D, count, 2>(high, low, keys + s, row, s * 16, sink);
    }
    if (s < shape.subtiles) {
      qk_block<D, count, 1>(high, low, keys + s, row, s * 16, sink);
    }
  });
}

// G groups of 16 dims from `group` on.
template <int D, int T, int R, int G, typename Sink>
inline void pv_block(const GemmShape& shape, const uint8_t* prob, int row,
                     const int8_t* levels, int group, Sink sink) {
  const uint8_t* high = prob + row * kTileTokens;
  const uint8_t* low = prob + (row + shape.low_row) * kTileTokens;
  Accumulators<T, R, G> acc;
  acc.clear();
  for (int quad = 0; quad < shape.subtiles * 4; ++quad) {
    __m512i level[G];
    unrolled<G>([&](auto g) {
      level[g] = _mm512_load_si512(levels + quad * D * 4 + (group + g) * 64);
    });
    unrolled<R>([&](auto r) {
      unrolled<T>([&](auto t) {
        const __m512i p =
            broadcast4((t == 0 ? high : low) + r * kTileTokens + quad * 4);
        unrolled<G>([&](auto g) {
          acc.sum[t][r][g] = _mm512_dpbusd_epi32(acc.sum[t][r][g], p, level[g]);
        });
      });
    });
  }
  acc.drain(row, group * 16, sink);
}

template <int D, int T, int R, typename Sink>
inline void pv_rows(const GemmShape& shape, const uint8_t* prob, int row,
                    const int8_t* levels, Prefetcher& prefetcher, Sink sink) {
  constexpr int G = T == 1 ? 4 : 2;  // groups of 16 dims per pass
  constexpr int kRest = D / 16 % G;
  int group = 0;
  for (; group + G <= D / 16; group += G) {
    prefetcher.step();
    pv_block<D, T, R, G>(shape, prob, row, levels, group, sink);
  }
  if constexpr (kRest > 0) {
    pv_block<D, T, R, kRest>(shape, prob, row, levels, group, sink);
  }
}

template <int D, int kTerms, typename Sink>
inline void gemm_pv(const GemmShape& shape, const uint8_t* prob, const int8_t* levels,
                    Prefetcher& prefetcher, Sink sink) {
  by_rows(shape.rows, [&](auto count, int row) {
    pv_rows<D, kTerms, count>(shape, prob, row, levels, prefetcher, sink);
  });
}

}  // namespace
}  // namespace polykv
