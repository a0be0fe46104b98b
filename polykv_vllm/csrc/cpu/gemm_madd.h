// SPDX-License-Identifier: Apache-2.0
// gemm_scalar.h where bytes have no exact dot product: AVX2, and AVX-512 without VNNI.
//
// The byte products of these sets (maddubs) saturate, so bytes are widened to int16 and
// both terms of the other operand become one int16: one product instead of two. The
// four bytes of a lane are taken as 0, 2 and 1, 3, which a mask and a shift separate.
// Everything wraps modulo 2^32, and what is left in the end fits.
#pragma once

namespace polykv {
namespace {

constexpr int kHeadDimStep = 16;  // head dimensions served here are multiples of it

struct TileConfig {
  TileConfig() {}
};

inline void store_prob(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  store_u16_pairs(high, low, x, unit);
}

// The order 0, 2, 1, 3 in each group of four int16.
inline __m256i pair_order(__m256i a) {
  return _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(a, 0xd8), 0xd8);
}

// 256 * high + low for the query codes of `rows` rows.
template <int D>
inline void join_terms(const GemmShape& shape, const int8_t* query, int16_t* out) {
  for (int r = 0; r < shape.rows; ++r) {
    const int8_t* high = query + r * D;
    const int8_t* low = high + shape.low_row * D;
    for (int d = 0; d < D; d += 16) {
      const __m256i h = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(high + d)));
      const __m256i l = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(low + d)));
      _mm256_store_si256(
          reinterpret_cast<__m256i*>(out + r * D + d),
          pair_order(_mm256_add_epi16(_mm256_slli_epi16(h, 8), l)));
    }
  }
}

// Scores of R rows with S subtiles; `query` [R][D], pairs in order.
template <int D, int R, int S, typename Sink>
inline void qk_block(const int16_t* query, const uint8_t* const* keys, int row,
                     int token, Sink sink) {
  constexpr int C = S * kGroupRegs;
  const Reg byte = set1_word(255);
  Accumulators<1, R, C> acc;
  acc.clear();
  int groups = D / 4;
  // A trip count that GCC 12 knows makes it spill every sum in every step.
  asm volatile("" : "+r"(groups));
  for (int g = 0; g < groups; ++g) {
    Reg even[C], odd[C];
    unrolled<C>([&](auto c) {
      const Reg key = load_reg(keys[c / kGroupRegs] + g * 64 + c % kGroupRegs * kRegBytes);
      even[c] = and_reg(key, byte);
      odd[c] = srl<8>(key);
    });
    unrolled<R>([&](auto r) {
      const Reg q02 = broadcast4(query + r * D + g * 4);
      const Reg q13 = broadcast4(query + r * D + g * 4 + 2);
      unrolled<C>([&](auto c) {
        acc.sum[0][r][c] = add_reg(acc.sum[0][r][c], madd(even[c], q02));
        acc.sum[0][r][c] = add_reg(acc.sum[0][r][c], madd(odd[c], q13));
      });
    });
  }
  acc.drain(row, token, [&](int r, int t, VecI sum, VecI zero) { sink(r, t, zero, sum); });
}

template <int D, typename Sink>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, Prefetcher& prefetcher, Sink sink) {
  alignas(64) int16_t joined[kSubRows * D];
  join_terms<D>(shape, query, joined);
  by_rows<kMaddRows>(shape.rows, [&](auto count, int row) {
    for (int s = 0; s < shape.subtiles; ++s) {
      prefetcher.step();
      if constexpr (kGroupRegs == 1) {
        if (s + 2 <= shape.subtiles) {
          qk_block<D, count, 2>(joined + row * D, keys + s, row, s * 16, sink);
          ++s;
          continue;
        }
      }
      qk_block<D, count, 1>(joined + row * D, keys + s, row, s * 16, sink);
    }
  });
}

// Probabilities p as int16, four tokens of a row after the other in the order of pairs.
// Sixteen bits do not fit: store_u16_pairs leaves p - 32768, 32 tokens of 64 where the
// high bytes belong and 32 where the low ones do. The sums begin with what that lacks.
template <int kTerms>
struct Probabilities {
  const uint8_t* high;  // of the first row
  const uint8_t* low;

  Probabilities(const GemmShape& shape, const uint8_t* prob)
      : high(prob), low(prob + shape.low_row * kTileTokens) {}
  // The tokens 32 * i to 32 * i + 31 of a row.
  const uint8_t* part(int row, int i) const {
    return (i % 2 == 0 ? high : low) + row * kTileTokens + i / 2 * 64;
  }
};

// Bytes of probabilities are widened here.
template <>
struct Probabilities<1> {
  alignas(64) int16_t joined[kSubRows * kTileTokens];

  Probabilities(const GemmShape& shape, const uint8_t* prob) {
    for (int i = 0; i < shape.rows * kTileTokens; i += 16) {
      const __m256i wide = _mm256_cvtepu8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(prob + i)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(joined + i), pair_order(wide));
    }
  }
  const uint8_t* part(int row, int i) const {
    return reinterpret_cast<const uint8_t*>(joined + row * kTileTokens + i * 32);
  }
};

// 32768 * the sum of a dim's levels. 128 levels fit in 16 bits.
template <int D>
inline void level_sums(const int8_t* levels, int quads, int32_t* out) {
  const Reg ones = set1_word(1);
  for (int d = 0; d < D; d += kRegLanes) {
    Reg sum = zero_reg();
    for (int quad = 0; quad < quads; ++quad) {
      sum = add_words(sum, pair_sums(load_reg(levels + (quad * D + d) * 4)));
    }
    store_reg(out + d, sll_lanes<15>(madd(sum, ones)));
  }
}

// Weighted values of R rows and C registers of dims; `levels` at the first of them.
template <int D, int R, int C, int kTerms, typename Sink>
inline void pv_block(const Probabilities<kTerms>& prob, const int8_t* levels,
                     const int32_t* start, int quads, int row, int dim, Sink sink) {
  Accumulators<1, R, C> acc;
  acc.fill([&](auto, auto, auto c) {
    return kTerms == 2 ? load_reg(start + c * kRegLanes) : zero_reg();
  });
  for (int part = 0; part * 8 < quads; ++part) {
    const uint8_t* p[R];
    unrolled<R>([&](auto r) { p[r] = prob.part(row + r, part); });
    const int count = quads - part * 8 < 8 ? quads - part * 8 : 8;
    for (int quad = 0; quad < count; ++quad) {
      Reg even[C], odd[C];
      unrolled<C>([&](auto c) {
        const Reg level = load_reg(levels + quad * D * 4 + c * kRegBytes);
        even[c] = sra<8>(sll<8>(level));
        odd[c] = sra<8>(level);
      });
      unrolled<R>([&](auto r) {
        const Reg p02 = broadcast4(p[r] + quad * 8);
        const Reg p13 = broadcast4(p[r] + quad * 8 + 4);
        unrolled<C>([&](auto c) {
          acc.sum[0][r][c] = add_reg(acc.sum[0][r][c], madd(even[c], p02));
          acc.sum[0][r][c] = add_reg(acc.sum[0][r][c], madd(odd[c], p13));
        });
      });
    }
    levels += 8 * D * 4;
  }
  acc.drain(row, dim, [&](int r, int d, VecI sum, VecI zero) {
    kTerms == 2 ? sink(r, d, zero, sum) : sink(r, d, sum, zero);
  });
}

template <int D, int kTerms, typename Sink>
inline void gemm_pv(const GemmShape& shape, const uint8_t* prob, const int8_t* levels,
                    Prefetcher& prefetcher, Sink sink) {
  constexpr int C = 2;
  const Probabilities<kTerms> parts(shape, prob);
  const int quads = shape.subtiles * 4;
  alignas(64) int32_t start[D];
  if (kTerms == 2) level_sums<D>(levels, quads, start);
  by_rows<kMaddRows>(shape.rows, [&](auto count, int row) {
    int dim = 0;
    for (; dim + C * kRegLanes <= D; dim += C * kRegLanes) {
      prefetcher.step();
      pv_block<D, count, C, kTerms>(parts, levels + dim * 4, start + dim, quads, row,
                                    dim, sink);
    }
    if constexpr (D / kRegLanes % C > 0) {
      pv_block<D, count, 1, kTerms>(parts, levels + dim * 4, start + dim, quads, row,
                                    dim, sink);
    }
  });
}

}  // namespace
}  // namespace polykv
