// SPDX-License-Identifier: Apache-2.0
// What one instruction set offers: each kernels_<isa>.cpp exports one table.
#pragma once

#include <cstdint>

#include "polykv/args.h"

namespace polykv {

// Tokens whose scores share one maximum and one int8 scale of the probabilities.
constexpr int kTileTokens = 128;
// Tokens of a split: splits lie at multiples of this from the start of the sequence
// and their partial results merge in ascending order, whoever computes them.
constexpr int kSplitTokens = 512;
constexpr int kSplitTiles = kSplitTokens / kTileTokens;
// Query rows (tokens x heads of the group) that one pass over the cache serves.
constexpr int kMaxRows = 64;

// Rows row_begin..row_begin+num_rows of a request; row = token*group + head of group.
struct RowRun {
  int32_t request;
  int32_t row_begin;
  int32_t num_rows;
};

// Rows that read the same tiles of one KV head: of one request, or of several that
// share these tiles.
struct RowBlock {
  const RowRun* runs;
  int32_t num_runs;
  int32_t num_rows;  // of all runs, <= kMaxRows
  int32_t kv_head;
};

// Running softmax state of a block of rows: maximum of the scores in base 2, sum of
// the weights, weighted sum of the (rotated) values. -inf, 0, 0 is the neutral state.
struct RowState {
  float* max;  // [kMaxRows]
  float* sum;  // [kMaxRows]
  float* acc;  // [kMaxRows, head_dim]
};

struct KernelTable {
  const char* name;
  bool (*supported)();
  // Tokens begin..end of StoreArgs, all heads.
  void (*store)(const StoreArgs& args, int64_t begin, int64_t end);
  // Folds tiles begin..end (exclusive) into `split`, the state of the split that they
  // lie in; at the end of a split, folds it into `total` and clears it. Both states
  // come from the caller, so that a row may go on where another pass ended.
  void (*attend)(const AttentionArgs& args, const RowBlock& rows, int begin_tile,
                 int end_tile, RowState total, RowState split);
  // state = merge(state, part): the fold that `attend` itself uses after a split.
  void (*merge)(int num_rows, int head_dim, RowState state, RowState part);
  // Attends to the raw keys and values that the rows see, which are one run; `raw` is
  // neutral. The queries of `args` are as the model made them.
  void (*attend_raw)(const AttentionArgs& args, const RowBlock& rows, RowState raw);
  // Normalises, rotates back, adds what raw values contribute, converts and writes the
  // rows. Without windows `raw` holds null pointers.
  void (*finish)(const AttentionArgs& args, const RowBlock& rows, RowState state,
                 RowState raw);
  // Queries of tokens begin..end times the matrices of their transform, to fp32
  // [num_tokens, num_heads, head_dim].
  void (*transform_queries)(const AttentionArgs& args, int64_t begin, int64_t end,
                            float* out);
};

const KernelTable& scalar_kernels();
const KernelTable& neon_kernels();
const KernelTable& neon_i8mm_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avxvnni_kernels();
const KernelTable& avx512bw_kernels();
const KernelTable& avx512_kernels();
const KernelTable& amx_kernels();

}  // namespace polykv
