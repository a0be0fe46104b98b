// SPDX-License-Identifier: Apache-2.0
// Integer scores of one row and tile -> 16-bit integer probabilities, and the fold of
// a tile's result into the running state. Nothing here looks at another row.
#pragma once

namespace polykv {
namespace {

constexpr float kProbMax = 65535.0f;
// Below this the reciprocal of the largest probability leaves fp32: such values
// (norm under 2e-34) count as zero.
constexpr float kProbTiny = 2e-34f;

// Per-token scales of one tile, as floats.
struct TileScales {
  alignas(64) float key[kTileTokens];
  alignas(64) float value[kTileTokens];
};

struct RowParams {
  float scale;         // query scale * softmax scale * log2(e)
  int32_t correction;  // -bias * sum of the query codes
  int64_t begin, end;  // positions that the row attends to
};

// What one tile gives the rows of a sub-block; weights are relative to each row's own
// maximum in the tile.
struct TileResult {
  alignas(64) float max[kSubRows];     // scores in base 2
  alignas(64) float sum[kSubRows];     // of weights
  alignas(64) float factor[kSubRows];  // value of one unit of the integer accumulator
  uint32_t valid;                      // rows that attend to anything in the tile
};

// Scratch of one sub-block and tile. `scores` and `prob` hold both terms (GemmShape).
struct SoftmaxBuffers {
  alignas(64) int32_t scores[2 * kSubRows * kTileTokens];
  alignas(64) float x[kSubRows * kTileTokens];
  alignas(64) uint8_t prob[2 * kSubRows * kTileTokens];
  TileScales scales;
  Prefetcher prefetcher;
};

inline Mask tokens_mask(int64_t begin, int64_t end, int first) {
  const int64_t low = begin - first, high = end - first;
  const uint32_t upper = high >= 16 ? 0xffffu : high <= 0 ? 0u : (1u << high) - 1;
  const uint32_t lower = low >= 16 ? 0xffffu : low <= 0 ? 0u : (1u << low) - 1;
  return static_cast<Mask>(upper & ~lower);
}

// The tokens of a tile that a row attends to, counted from the tile's start.
struct TokenRange {
  int64_t begin, end;
  bool covers(int tokens) const { return begin <= 0 && end >= tokens; }
};

// Combines the terms, scales by the keys; returns the lane-wise maximum.
template <bool kMasked>
inline VecF scale_scores(const int32_t* high, const int32_t* low,
                         const float* key_scale, int32_t correction, TokenRange range,
                         int subtiles, float* x) {
  const VecI offset = set1_i(correction);
  VecF top = set1(-kInf);
  for (int t = 0; t < subtiles * 16; t += 16) {
    const VecI dot = add_i(shift_left<8>(load_i(high + t)), load_i(low + t));
    VecF score = mul(to_float(add_i(dot, offset)), load(key_scale + t));
    if constexpr (kMasked) {
      score = select(tokens_mask(range.begin, range.end, t), score, set1(-kInf));
    }
    store(x + t, score);
    top = max(top, score);
  }
  return top;
}

// Replaces scores by weight * value scale. The row's weight is 2^(score - max); the
// probability carries the value scale, so that PV sums integer levels.
template <bool kMasked>
inline void weigh(const float* value_scale, float scale, float minus_max,
                  TokenRange range, int subtiles, float* x, VecF* sum, VecF* top) {
  const VecF scale_v = set1(scale), offset = set1(minus_max), zero = set1(0.0f);
  VecF total = zero, largest = zero;
  for (int t = 0; t < subtiles * 16; t += 16) {
    VecF weight = exp2(fma(load(x + t), scale_v, offset));
    VecF prob = mul(weight, load(value_scale + t));
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
}

// Rounds to 16 bits in units of 1/`unit` and splits them into two bytes; zeros up to
// the next multiple of 64 tokens.
inline void quantize_prob(float* x, float unit, int subtiles, uint8_t* high,
                          uint8_t* low) {
  const VecF unit_v = set1(unit);
  const int padded = (subtiles + 3) / 4 * 4;
  for (int s = subtiles; s < padded; ++s) store(x + s * 16, set1(0.0f));
  for (int t = 0; t < padded * 16; t += 64) {
    VecI p[4];
    for (int i = 0; i < 4; ++i) p[i] = to_int(mul(load(x + t + i * 16), unit_v));
    store_u16_split(high + t, low + t, p);
  }
}

// Scores of `rows` rows -> probabilities, row by row in three sweeps, so that the
// reductions of all rows run side by side.
inline void tile_softmax(int rows, int low_row, int subtiles, const RowParams* params,
                         int64_t tile_begin, SoftmaxBuffers& buffers,
                         TileResult& result) {
  VecF lanes[kSubRows], tops[kSubRows];
  alignas(64) float scale[kSubRows] = {}, minus_max[kSubRows], unit[kSubRows];
  const int tokens = subtiles * 16;
  const auto range = [&](int r) {
    return TokenRange{params[r].begin - tile_begin, params[r].end - tile_begin};
  };
  for (int r = 0; r < kSubRows; ++r) lanes[r] = tops[r] = set1(0.0f);
  for (int r = 0; r < rows; ++r) {
    buffers.prefetcher.step();
    const int32_t* high = buffers.scores + r * kTileTokens;
    const int32_t* low = buffers.scores + (r + low_row) * kTileTokens;
    float* x = buffers.x + r * kTileTokens;
    const bool full = range(r).covers(tokens);
    lanes[r] = (full ? scale_scores<false>
                     : scale_scores<true>)(high, low, buffers.scales.key,
                                           params[r].correction, range(r), subtiles, x);
    scale[r] = params[r].scale;
  }
  const VecF row_max = mul(reduce_max_rows(lanes), load(scale));
  store(result.max, row_max);
  store(minus_max, sub(set1(0.0f), row_max));
  for (int r = 0; r < rows; ++r) {
    buffers.prefetcher.step();
    const bool full = range(r).covers(tokens);
    (full ? weigh<false> : weigh<true>)(buffers.scales.value, scale[r], minus_max[r],
                                        range(r), subtiles, buffers.x + r * kTileTokens,
                                        &lanes[r], &tops[r]);
  }
  store(result.sum, reduce_add_rows(lanes));
  const VecF prob_max = reduce_max_rows(tops);
  const Mask usable = greater(prob_max, set1(kProbTiny));
  store(unit, select(usable, div(set1(kProbMax), prob_max), set1(0.0f)));
  store(result.factor, select(usable, mul(prob_max, set1(1 / kProbMax)), set1(0.0f)));
  for (int r = 0; r < rows; ++r) {
    buffers.prefetcher.step();
    quantize_prob(buffers.x + r * kTileTokens, unit[r], subtiles,
                  buffers.prob + r * kTileTokens,
                  buffers.prob + (r + low_row) * kTileTokens);
  }
}

// state = state * old + part * fresh, where both weights are relative to the new
// maximum. `part_acc(r, d)` gives 16 lanes of the part's weighted values.
template <int D, typename PartAcc>
inline void fold(int first, int rows, uint32_t valid, const float* part_max,
                 const float* part_sum, const float* factor, RowState state,
                 PartAcc part_acc) {
  alignas(64) float old_weight[16], new_weight[16], merged_max[16], merged_sum[16];
  const VecF state_max = load(state.max + first);
  const VecF peak = max(state_max, load(part_max));
  const VecF old = exp2(sub(state_max, peak));
  const VecF fresh = exp2(sub(load(part_max), peak));
  store(old_weight, old);
  store(new_weight, mul(fresh, load(factor)));
  store(merged_max, peak);
  store(merged_sum, fma(load(part_sum), fresh, mul(load(state.sum + first), old)));
  for (int r = 0; r < rows; ++r) {
    if (!(valid >> r & 1)) continue;
    state.max[first + r] = merged_max[r];
    state.sum[first + r] = merged_sum[r];
    float* acc = state.acc + (first + r) * D;
    const VecF a = set1(old_weight[r]), b = set1(new_weight[r]);
    for (int d = 0; d < D; d += 16) {
      store(acc + d, fma(part_acc(r, d), b, mul(load(acc + d), a)));
    }
  }
}

}  // namespace
}  // namespace polykv
