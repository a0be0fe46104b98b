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

// What one tile gives one row; weights are relative to the tile's own maximum.
struct TileResult {
  float max[kSubRows];     // scores in base 2
  float sum[kSubRows];     // of weights
  float factor[kSubRows];  // value of one unit of the integer accumulator
  uint32_t valid;          // rows that attend to anything in the tile
};

inline Mask tokens_mask(int64_t begin, int64_t end, int first) {
  const int64_t low = begin - first, high = end - first;
  const uint32_t upper = high >= 16 ? 0xffffu : high <= 0 ? 0u : (1u << high) - 1;
  const uint32_t lower = low >= 16 ? 0xffffu : low <= 0 ? 0u : (1u << low) - 1;
  return static_cast<Mask>(upper & ~lower);
}

// `high`, `low`: the two terms of the scores [subtiles * 16]; `begin..end`: the row's
// tokens counted from the tile's start. Writes both terms of the probabilities up to
// the next multiple of 64 tokens. The row's weight of token t is 2^(score - max); its
// probability carries the value scale too, so that PV sums integer levels.
inline void tile_softmax(const int32_t* high, const int32_t* low,
                         const TileScales& scales, const RowParams& row, int64_t begin,
                         int64_t end, int subtiles, uint8_t* prob_high,
                         uint8_t* prob_low, int r, TileResult* result) {
  alignas(64) float x[kTileTokens];
  Mask masks[kTileTokens / 16];
  const VecI correction = set1_i(row.correction);
  VecF top = set1(-kInf);
  for (int s = 0; s < subtiles; ++s) {
    const int t = s * 16;
    masks[s] = tokens_mask(begin, end, t);
    const VecI dot = add_i(shift_left<8>(load_i(high + t)), load_i(low + t));
    const VecF score = mul(to_float(add_i(dot, correction)), load(scales.key + t));
    const VecF kept = select(masks[s], score, set1(-kInf));
    store(x + t, kept);
    top = max(top, kept);
  }
  const float scale = row.scale;
  const float score_max = reduce_max(top) * scale;
  const VecF scale_v = set1(scale), minus_max = set1(-score_max), zero = set1(0.0f);
  VecF sum = zero, prob_top = zero;
  for (int s = 0; s < subtiles; ++s) {
    const int t = s * 16;
    const VecF weight =
        select(masks[s], exp2(fma(load(x + t), scale_v, minus_max)), zero);
    sum = add(sum, weight);
    const VecF prob = select(masks[s], mul(weight, load(scales.value + t)), zero);
    prob_top = max(prob_top, prob);
    store(x + t, prob);
  }
  const float prob_max = reduce_max(prob_top);
  const bool tiny = prob_max < kProbTiny;
  const VecF unit = set1(tiny ? 0.0f : kProbMax / prob_max);
  const int padded = (subtiles + 3) / 4 * 4;
  for (int s = subtiles; s < padded; ++s) store(x + s * 16, zero);
  for (int s = 0; s < padded; s += 4) {
    VecI p[4];
    for (int i = 0; i < 4; ++i) p[i] = to_int(mul(load(x + (s + i) * 16), unit));
    store_u16_split(prob_high + s * 16, prob_low + s * 16, p);
  }
  result->max[r] = score_max;
  result->sum[r] = reduce_add(sum);
  result->factor[r] = tiny ? 0.0f : prob_max / kProbMax;
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
