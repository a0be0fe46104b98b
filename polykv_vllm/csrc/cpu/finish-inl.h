// SPDX-License-Identifier: Apache-2.0
// From the states of complete rows to their results.
#pragma once

namespace polykv {
namespace {

// What a row's weighted values are multiplied with: the reciprocal of its weights' sum,
// relative to `peak`. A sink adds its weight to the sum, here and nowhere else.
inline float normalizer(const LogitTerms& logits, int64_t head, float peak, float sum,
                        float norm) {
  if (sum == 0) return 0.0f;  // the row saw no token
  if (!logits.sinks) return 1.0f / (sum * norm);
  const float sink = logits.sinks[head] * kLog2E;
  const float top = sink > peak ? sink : peak;
  const float weight = first(exp2(set1(peak - top)));
  const float total = std::fma(sum, weight, first(exp2(set1(sink - top))));
  return weight / (total * norm);
}

// The same for a row that saw cached tokens and raw ones, or raw ones alone.
struct Normalizers {
  float cached, raw;
};

inline Normalizers normalizers(const LogitTerms& logits, int64_t head,
                               float cached_peak, float cached_sum, float raw_peak,
                               float raw_sum, float norm) {
  float top = cached_peak > raw_peak ? cached_peak : raw_peak;
  const float sink = logits.sinks ? logits.sinks[head] * kLog2E : -kInf;
  top = sink > top ? sink : top;
  const float cached_weight = first(exp2(set1(cached_peak - top)));
  const float raw_weight = first(exp2(set1(raw_peak - top)));
  float total = std::fma(cached_sum, cached_weight, raw_sum * raw_weight);
  if (logits.sinks) total += first(exp2(set1(sink - top)));
  return {cached_weight / (total * norm), raw_weight / total};
}

template <int D>
inline void finish_run(const AttentionArgs& args, int kv_head, const RowRun& run,
                       RowState state, RowState raw) {
  const int group = args.num_heads / args.cache.num_kv_heads;
  const bool turned = args.cache.format.rotate;
  const float norm = turned ? std::sqrt(static_cast<float>(widest_block(D))) : 1.0f;
  for (int r = 0; r < run.num_rows; ++r) {
    float* acc = state.acc + r * D;
    const int64_t token =
        args.query_start_loc[run.request] + (run.row_begin + r) / group;
    const int64_t head = kv_head * group + (run.row_begin + r) % group;
    const bool has_raw = raw.sum != nullptr && raw.sum[r] != 0;  // a NaN is something
    const Normalizers both =
        has_raw ? normalizers(args.logits, head, state.max[r], state.sum[r], raw.max[r],
                              raw.sum[r], norm)
                : Normalizers{
                      normalizer(args.logits, head, state.max[r], state.sum[r], norm),
                      0.0f};
    // Before the rotation, whose sums could overflow for values near fp32's limit.
    const VecF factor = set1(both.cached);
    for (int d = 0; d < D; d += 16) store(acc + d, mul(load(acc + d), factor));
    if (turned) rotate_unnormalized<D>(acc);
    if (has_raw) {
      const float* values = raw.acc + r * D;
      for (int d = 0; d < D; d += 16) {
        store(acc + d, fma(load(values + d), set1(both.raw), load(acc + d)));
      }
    }
    store_row<D>(args.output,
                 token * args.output_token_stride + head * args.output_head_stride,
                 args.dtype, acc);
  }
}

template <int D>
inline void finish_rows(const AttentionArgs& args, const RowBlock& block,
                        RowState state, RowState raw) {
  int row = 0;
  for (int i = 0; i < block.num_runs; ++i) {
    const RowRun& run = block.runs[i];
    const auto rows = [&](RowState all) {
      return all.sum == nullptr
                 ? all
                 : RowState{all.max + row, all.sum + row, all.acc + row * D};
    };
    finish_run<D>(args, block.kv_head, run, rows(state), rows(raw));
    row += run.num_rows;
  }
}

}  // namespace
}  // namespace polykv
