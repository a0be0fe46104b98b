// SPDX-License-Identifier: Apache-2.0
// Integer scores of one row and tile -> 16-bit integer probabilities, and the fold of
// a tile's result into the running state. Nothing here looks at another row.
#pragma once

namespace polykv {
namespace {

// Largest integer probability, of one byte or two, and the value of its unit's high
// byte in units of the sums: they count the low byte.
template <int kTerms>
constexpr float kProbMax = kTerms == 2 ? 65535.0f : 255.0f;
template <int kTerms>
constexpr float kSumMax = kTerms == 2 ? 65535.0f : 255.0f * 256.0f;
// Below this the reciprocal of the largest probability leaves fp32: such values
// (norm under 2e-34) count as zero.
constexpr float kProbTiny = 2e-34f;

// Per-token scales of one tile, as floats. Of affine rows also what a code of zero, for
// values a level of zero, stands for.
struct TileScales {
  alignas(64) float key[kTileTokens];
  alignas(64) float value[kTileTokens];
  alignas(64) float key_zero[kTileTokens];
  alignas(64) float value_zero[kTileTokens];
  bool affine_keys, affine_values;
};

constexpr float kLog2E = 1.44269504f;

struct RowParams {
  float scale;         // query scale * softmax scale * log2(e)
  float to_tanh;       // query scale * softmax scale / soft cap
  float slope;         // ALiBi slope * log2(e)
  int32_t correction;  // -bias * sum of the query codes; affine keys: that sum
  int64_t begin, end;  // positions that the row attends to here
  int64_t position;    // of the row itself
};

// What happens to all scores of a call before the softmax, in base 2.
struct ScoreTerms {
  bool any;   // whether anything does
  float cap;  // soft cap * log2(e), 0 without one
};

// What one tile gives the rows of a sub-block; weights are relative to each row's own
// maximum in the tile.
struct TileResult {
  alignas(64) float max[kSubRows];     // scores in base 2
  alignas(64) float sum[kSubRows];     // of weights
  alignas(64) float factor[kSubRows];  // value of one unit of the integer accumulator
  alignas(64) float zero[kSubRows];    // weighted sum of the zeros of affine values
  uint32_t valid;                      // rows that attend to anything in the tile
};

// Scratch of one sub-block and tile. `prob` holds both terms (GemmShape).
struct SoftmaxBuffers {
  alignas(64) float x[kSubRows * kTileTokens];  // scores, then probabilities
  alignas(64) float top[kSubRows][16];          // lane-wise maxima of the scores
  alignas(64) uint8_t prob[2 * kSubRows * kTileTokens];
  TileScales scales;
  ScoreTerms terms;
  Prefetcher prefetcher;
};

inline Mask tokens_mask(int64_t begin, int64_t end, int first) {
  const int64_t low = begin - first, high = end - first;
  const uint32_t upper = high >= 16 ? 0xffffu : high <= 0 ? 0u : (1u << high) - 1;
  const uint32_t lower = low >= 16 ? 0xffffu : low <= 0 ? 0u : (1u << low) - 1;
  return lane_mask(upper & ~lower);
}

// The tokens of a tile that a row attends to, counted from the tile's start.
struct TokenRange {
  int64_t begin, end;
  bool covers(int tokens) const { return begin <= 0 && end >= tokens; }
};

// Receives the scores of QK: combines the terms and scales by the keys.
template <bool kAffine>
struct ScoreSink {
  const RowParams* rows;
  SoftmaxBuffers& buffers;

  void begin(int num_rows) const {
    for (int r = 0; r < num_rows; ++r) store(buffers.top[r], set1(-kInf));
  }
  void operator()(int r, int token, VecI high, VecI low) const {
    const VecI dot = add_i(shift_left<8>(high), low);
    const VecF scale = load(buffers.scales.key + token);
    VecF score;
    if constexpr (kAffine) {
      const VecF sum = set1(static_cast<float>(rows[r].correction));
      const VecF zero = mul(load(buffers.scales.key_zero + token), sum);
      score = fma(to_float(dot), scale, zero);
    } else {
      score = mul(to_float(add_i(dot, set1_i(rows[r].correction))), scale);
    }
    store(buffers.x + r * kTileTokens + token, score);
    store(buffers.top[r], max(load(buffers.top[r]), score));
  }
};

// Hides the tokens that a row does not attend to; what they hold may be anything.
inline void mask_scores(TokenRange range, int subtiles, float* x, float* top) {
  VecF largest = set1(-kInf);
  for (int t = 0; t < subtiles * 16; t += 16) {
    const VecF score =
        select(tokens_mask(range.begin, range.end, t), load(x + t), set1(-kInf));
    store(x + t, score);
    largest = max(largest, score);
  }
  store(top, largest);
}

// Turns products of integers into capped and biased scores in base 2, whose scale is 1,
// and hides what mask_scores hides. A bias depends on the distance between two
// positions alone, which is exact up to 2^24.
inline void apply_terms(const ScoreTerms& terms, const RowParams& row,
                        int64_t tile_begin, int subtiles, float* x, float* top) {
  alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                     8, 9, 10, 11, 12, 13, 14, 15};
  const VecI lanes = load_i(kLanes);
  const VecF scale = set1(row.scale), to_tanh = set1(row.to_tanh);
  const VecF cap = set1(terms.cap), slope = set1(row.slope);
  const int64_t begin = row.begin - tile_begin, end = row.end - tile_begin;
  const int64_t position = row.position - tile_begin;
  VecF largest = set1(-kInf);
  for (int t = 0; t < subtiles * 16; t += 16) {
    VecF score = load(x + t);
    score = terms.cap > 0 ? mul(cap, tanh(mul(score, to_tanh))) : mul(score, scale);
    if (row.slope != 0) {
      const VecI distance = add_i(lanes, set1_i(static_cast<int32_t>(t - position)));
      score = fma(to_float(distance), slope, score);
    }
    score = select(tokens_mask(begin, end, t), score, set1(-kInf));
    store(x + t, score);
    largest = max(largest, score);
  }
  store(top, largest);
}

// Replaces scores by weight * value scale. The row's weight is 2^(score - max); the
// probability carries the value scale, so that PV sums integer levels. kAffine: `zeros`
// becomes the weighted sum of the values' zeros.
template <bool kMasked, bool kAffine>
inline void weigh(const TileScales& scales, float scale, float minus_max,
                  TokenRange range, int subtiles, float* x, VecF* sum, VecF* top,
                  VecF* zeros) {
  const VecF scale_v = set1(scale), offset = set1(minus_max), zero = set1(0.0f);
  VecF total = zero, largest = zero, shift = zero;
  for (int t = 0; t < subtiles * 16; t += 16) {
    VecF weight = exp2(fma(load(x + t), scale_v, offset));
    VecF prob = mul(weight, load(scales.value + t));
    if constexpr (kAffine) {
      VecF part = mul(weight, load(scales.value_zero + t));
      if constexpr (kMasked) {
        part = select(tokens_mask(range.begin, range.end, t), part, zero);
      }
      shift = add(shift, part);
    }
    if constexpr (kMasked) {
      const Mask mask = tokens_mask(range.begin, range.end, t);
      weight = select(mask, weight, zero);
      prob = select(mask, prob, zero);
    }
    total = add(total, weight);
    largest = max(largest, prob);
    store(x + t, prob);
  }
  *sum = total;
  *top = largest;
  *zeros = shift;
}

// Rounds to 16 bits in units of 1/`unit` and splits them into two bytes, or rounds to 8
// bits; zeros up to the next multiple of 64 tokens.
template <int kTerms>
inline void quantize_prob(float* x, float unit, int subtiles, uint8_t* high,
                          uint8_t* low) {
  const VecF unit_v = set1(unit);
  const int padded = (subtiles + 3) / 4 * 4;
  for (int s = subtiles; s < padded; ++s) store(x + s * 16, set1(0.0f));
  for (int t = 0; t < padded * 16; t += 64) {
    const VecF p[4] = {load(x + t), load(x + t + 16), load(x + t + 32),
                       load(x + t + 48)};
    if constexpr (kTerms == 2) {
      store_prob(high + t, low + t, p, unit_v);
    } else {
      store_u8(high + t, p, unit_v);
    }
  }
}

// Scores of `rows` rows -> probabilities, row by row in sweeps, so that the reductions
// of all rows run side by side. kSubtiles is their number if the tile is whole, so
// that the loops over it unroll; else 0. kPlain: nothing but a scale happens to scores.
template <int kSubtiles, int kTerms, bool kPlain, bool kAffine>
inline void softmax_rows(const GemmShape& shape, const RowParams* params,
                         int64_t tile_begin, SoftmaxBuffers& buffers,
                         TileResult& result) {
  VecF lanes[kSubRows], tops[kSubRows], zeros[kSubRows];
  alignas(64) float scale[kSubRows] = {}, minus_max[kSubRows], unit[kSubRows];
  const int subtiles = kSubtiles > 0 ? kSubtiles : shape.subtiles;
  const auto range = [&](int r) {
    return TokenRange{params[r].begin - tile_begin, params[r].end - tile_begin};
  };
  for (int r = 0; r < kSubRows; ++r) lanes[r] = tops[r] = zeros[r] = set1(0.0f);
  for (int r = 0; r < shape.rows; ++r) {
    float* x = buffers.x + r * kTileTokens;
    if constexpr (!kPlain) {
      apply_terms(buffers.terms, params[r], tile_begin, subtiles, x, buffers.top[r]);
    } else if (!range(r).covers(subtiles * 16)) {
      mask_scores(range(r), subtiles, x, buffers.top[r]);
    }
    lanes[r] = load(buffers.top[r]);
    scale[r] = kPlain ? params[r].scale : 1.0f;
  }
  const VecF row_max = mul(reduce_max_rows(lanes), load(scale));
  store(result.max, row_max);
  store(minus_max, sub(set1(0.0f), row_max));
  for (int r = 0; r < shape.rows; ++r) {
    buffers.prefetcher.step();
    float* x = buffers.x + r * kTileTokens;
    if (range(r).covers(subtiles * 16)) {
      weigh<false, kAffine>(buffers.scales, scale[r], minus_max[r], range(r), subtiles,
                            x, &lanes[r], &tops[r], &zeros[r]);
    } else {
      weigh<true, kAffine>(buffers.scales, scale[r], minus_max[r], range(r), subtiles,
                           x, &lanes[r], &tops[r], &zeros[r]);
    }
  }
  store(result.sum, reduce_add_rows(lanes));
  if constexpr (kAffine) store(result.zero, reduce_add_rows(zeros));
  const VecF prob_max = reduce_max_rows(tops);
  const Mask usable = greater(prob_max, set1(kProbTiny));
  store(unit, select(usable, div(set1(kProbMax<kTerms>), prob_max), set1(0.0f)));
  store(result.factor,
        select(usable, mul(prob_max, set1(1 / kSumMax<kTerms>)), set1(0.0f)));
  for (int r = 0; r < shape.rows; ++r) {
    buffers.prefetcher.step();
    quantize_prob<kTerms>(buffers.x + r * kTileTokens, unit[r], subtiles,
                          buffers.prob + r * kTileTokens,
                          buffers.prob + (r + shape.low_row) * kTileTokens);
  }
}

template <int kTerms, bool kAffine>
inline void softmax_tile(const GemmShape& shape, const RowParams* params,
                         int64_t tile_begin, SoftmaxBuffers& buffers,
                         TileResult& result) {
  constexpr int kWhole = kTileTokens / kSubtileTokens;
  if (buffers.terms.any) {
    softmax_rows<0, kTerms, false, kAffine>(shape, params, tile_begin, buffers, result);
  } else if (shape.subtiles == kWhole) {
    softmax_rows<kWhole, kTerms, true, kAffine>(shape, params, tile_begin, buffers,
                                                result);
  } else {
    softmax_rows<0, kTerms, true, kAffine>(shape, params, tile_begin, buffers, result);
  }
}

template <int kTerms>
inline void tile_softmax(const GemmShape& shape, const RowParams* params,
                         int64_t tile_begin, SoftmaxBuffers& buffers,
                         TileResult& result) {
  if (buffers.scales.affine_values) {
    softmax_tile<kTerms, true>(shape, params, tile_begin, buffers, result);
  } else {
    softmax_tile<kTerms, false>(shape, params, tile_begin, buffers, result);
  }
}

// How a part enters the running state: state = state * old + part * fresh, both
// relative to the new maximum.
struct Fold {
  alignas(64) float old[16], fresh[16];
  alignas(64) float zero[16];  // of a tile with affine values: is added, too
  uint32_t valid;              // rows that the part has anything of
};

// Updates maxima and sums of up to 16 rows from `first` on. `factor`: the value of one
// unit of the part's weighted values; `zero`: what affine values add to each, or null.
inline Fold fold_sums(int first, int rows, uint32_t valid, const float* part_max,
                      const float* part_sum, const float* factor, const float* zero,
                      RowState state) {
  Fold fold;
  fold.valid = valid;
  alignas(64) float merged_max[16], merged_sum[16];
  const VecF state_max = load(state.max + first);
  const VecF peak = max(state_max, load(part_max));
  const VecF old = exp2(sub(state_max, peak));
  const VecF fresh = exp2(sub(load(part_max), peak));
  store(fold.old, old);
  store(fold.fresh, mul(fresh, load(factor)));
  if (zero != nullptr) store(fold.zero, mul(fresh, load(zero)));
  store(merged_max, peak);
  store(merged_sum, fma(load(part_sum), fresh, mul(load(state.sum + first), old)));
  for (int r = 0; r < rows; ++r) {
    if (!(valid >> r & 1)) continue;
    state.max[first + r] = merged_max[r];
    state.sum[first + r] = merged_sum[r];
  }
  return fold;
}

inline void fold_values(const Fold& fold, int r, float* acc, VecF part) {
  store(acc, fma(part, set1(fold.fresh[r]), mul(load(acc), set1(fold.old[r]))));
}

// Receives the sums of PV and folds them into the rows' weighted values.
template <int D, bool kAffine>
struct ValueSink {
  const Fold& fold;
  float* acc;  // of the first row

  void operator()(int r, int dim, VecI high, VecI low) const {
    if (!(fold.valid >> r & 1)) return;
    const VecF part = to_float(add_i(shift_left<8>(high), low));
    float* row = acc + r * D + dim;
    if constexpr (kAffine) {
      const VecF old = fma(load(row), set1(fold.old[r]), set1(fold.zero[r]));
      store(row, fma(part, set1(fold.fresh[r]), old));
    } else {
      fold_values(fold, r, row, part);
    }
  }
};

}  // namespace
}  // namespace polykv
