// SPDX-License-Identifier: Apache-2.0
// Attention of a block of query rows straight from packed tiles.
//
// A row's result is a function of the row and of the cached bytes alone: its tiles and
// splits lie at fixed positions of the sequence, its query and probabilities are
// quantized by its own scales, the integer products are exact, and partial results
// fold in ascending order. Which rows share a pass, how a prompt was chunked and how
// many threads work cannot change a bit of it.
#pragma once

namespace polykv {
namespace {

constexpr float kQueryMax = 32639.0f;  // 127 * 256 + 127: both terms fit in int8
constexpr float kQueryTiny = 1e-34f;   // below, the reciprocal would leave fp32

template <int D>
struct Scratch {
  alignas(64) int8_t query[kMaxRows / kSubRows][2 * kSubRows * D];
  alignas(64) int8_t levels[kTileTokens * D];
  alignas(64) uint8_t keys[kTileTokens * D];  // of less than 8 bits, a byte each
  SoftmaxBuffers softmax;
  RowParams rows[kMaxRows];
  TileResult result;
  const uint8_t* key_tiles[kTileTokens / kSubtileTokens];
};

template <typename T>
T& thread_scratch() {
  // Zeroed once, so that rows beyond the last one hold integers, not NaN patterns. On
  // the heap, as a library that is loaded late has little room for such variables.
  struct Owner {
    T* scratch = new T();
    ~Owner() { delete scratch; }
  };
  static thread_local Owner owner;
  return *owner.scratch;
}

inline GemmShape sub_shape(int num_rows, int sub) {
  const int left = num_rows - sub * kSubRows;
  const int rows = left < kSubRows ? left : kSubRows;
  return {rows, 2 * rows <= kSubRows ? rows : kSubRows, 0};
}

// q = unit * (256 * high + low), both int8. Returns the sum of the codes and the unit.
template <int D>
inline int32_t quantize_query(const float* q, int8_t* high, int8_t* low, float* unit) {
  const int32_t magnitude = max_magnitude_bits<D>(q);
  const float peak = magnitude >= 0x7f800000 ? __builtin_nanf("") : float_of(magnitude);
  const VecF inverse = set1(peak < kQueryTiny ? 0.0f : kQueryMax / peak);
  VecI sum = set1_i(0);
  for (int d = 0; d < D; d += 16) {
    const VecI code = to_int(mul(load(q + d), inverse));
    const VecI top = shift_right<8>(add_i(code, set1_i(128)));
    store_i8(high + d, top);
    store_i8(low + d, sub_i(code, shift_left<8>(top)));
    sum = add_i(sum, code);
  }
  *unit = peak / kQueryMax;
  return reduce_add_i(sum);
}

template <int D>
inline void load_run(const AttentionArgs& args, const RowBlock& block,
                     const RowRun& run, int row, Scratch<D>& scratch) {
  const int group = args.num_heads / args.cache.num_kv_heads;
  const int64_t first_token = args.query_start_loc[run.request];
  const int64_t query_len = args.query_start_loc[run.request + 1] - first_token;
  const int64_t context = args.seq_lens[run.request] - query_len;
  const Format& format = args.cache.format;
  const int bias = format.key_quantizer == Quantizer::kAffine ? -1 : key_bias(format);
  for (int i = run.row_begin; i < run.row_begin + run.num_rows; ++i, ++row) {
    const int64_t token = i / group, head = block.kv_head * group + i % group;
    alignas(64) float q[D];
    load_row<D>(
        q, args.query,
        (first_token + token) * args.query_token_stride + head * args.query_head_stride,
        args.query_dtype);
    transform_row<D>(q, args.query_transform, block.kv_head);
    int8_t* high = scratch.query[row / kSubRows] + row % kSubRows * D;
    int8_t* low = high + sub_shape(block.num_rows, row / kSubRows).low_row * D;
    RowParams& params = scratch.rows[row];
    float unit;
    params.correction = -bias * quantize_query<D>(q, high, low, &unit);
    params.scale = unit * args.scale * kLog2E;
    const LogitTerms& logits = args.logits;
    params.to_tanh = logits.soft_cap > 0 ? unit * args.scale / logits.soft_cap : 0.0f;
    params.slope = logits.alibi_slopes ? logits.alibi_slopes[head] * kLog2E : 0.0f;
    params.position = context + token;
    const TokenSpan cached = seen_tokens(args, run.request, params.position).cached;
    // An empty span lies in no tile, wherever it would have been.
    params.begin = cached.empty() ? 0 : cached.begin;
    params.end = cached.empty() ? 0 : cached.end;
  }
}

template <int D>
inline void load_queries(const AttentionArgs& args, const RowBlock& block,
                         Scratch<D>& scratch) {
  int row = 0;
  for (int i = 0; i < block.num_runs; ++i) {
    load_run<D>(args, block, block.runs[i], row, scratch);
    row += block.runs[i].num_rows;
  }
}

// Unpacks the values of a tile, converts its scales, notes where its keys are.
// The next tile, as far as tokens below `fetch_end` reach, is planned to be fetched
// ahead.
template <int D>
inline void load_tile(const TileReader<D>& reader, int64_t tile_begin, int subtiles,
                      int64_t fetch_end, Scratch<D>& scratch) {
  const Format& format = reader.cache.format;
  Prefetcher& prefetcher = scratch.softmax.prefetcher;
  prefetcher.clear();
  const int64_t next = tile_begin + kTileTokens;
  for (int64_t token = next; token < next + kTileTokens && token < fetch_end;
       token += kSubtileTokens) {
    reader.plan(token, prefetcher);
  }
  for (int s = 0; s < subtiles; ++s) {
    prefetcher.step();
    const int64_t token = tile_begin + s * kSubtileTokens;
    const auto source = reader.subtile(token);
    unpack_values<D>(format, source.codes, source.high, source.keys,
                     scratch.levels + s * kSubtileTokens * D);
    scratch.key_tiles[s] = source.keys;
    if (format.key_bits < 8) {
      uint8_t* bytes = scratch.keys + s * kSubtileTokens * D;
      if (format.key_bits == 7) {
        strip_free_bit<D>(source.keys, bytes);
      } else {
        unpack_keys<D>(format, source.keys, source.key_high, bytes);
      }
      scratch.key_tiles[s] = bytes;
    }
    load_scales(format, source, s * kSubtileTokens, scratch.softmax.scales);
  }
}

// The rows of one sub-block that attend to anything in a tile.
struct SubTile {
  int sub;
  GemmShape shape;
  uint32_t valid;
};

inline SubTile sub_tile(const RowBlock& block, const RowParams* params, int sub,
                        int64_t tile_begin, int subtiles) {
  SubTile out{sub, sub_shape(block.num_rows, sub), 0};
  const RowParams* rows = params + sub * kSubRows;
  int64_t last = 0;
  for (int r = 0; r < out.shape.rows; ++r) {
    if (rows[r].begin < tile_begin + kTileTokens && rows[r].end > tile_begin) {
      out.valid |= 1u << r;
      last = rows[r].end > last ? rows[r].end : last;
    }
  }
  const int64_t needed = (last - tile_begin + kSubtileTokens - 1) / kSubtileTokens;
  out.shape.subtiles = static_cast<int>(needed < subtiles ? needed : subtiles);
  return out;
}

template <int D>
inline void score_tile(const SubTile& part, Scratch<D>& scratch) {
  const auto run = [&](auto sink) {
    sink.begin(part.shape.rows);
    gemm_qk<D>(part.shape, scratch.query[part.sub], scratch.key_tiles,
               scratch.softmax.prefetcher, sink);
  };
  const RowParams* rows = scratch.rows + part.sub * kSubRows;
  if (scratch.softmax.scales.affine_keys) {
    run(ScoreSink<true>{rows, scratch.softmax});
  } else {
    run(ScoreSink<false>{rows, scratch.softmax});
  }
}

template <int D, int kTerms>
inline void accumulate_tile(const SubTile& part, Scratch<D>& scratch, RowState split) {
  const TileResult& result = scratch.result;
  const int first = part.sub * kSubRows;
  const bool affine = scratch.softmax.scales.affine_values;
  const Fold fold =
      fold_sums(first, part.shape.rows, part.valid, result.max, result.sum,
                result.factor, affine ? result.zero : nullptr, split);
  const auto run = [&](auto sink) {
    gemm_pv<D, kTerms>(part.shape, scratch.softmax.prob, scratch.levels,
                       scratch.softmax.prefetcher, sink);
  };
  float* acc = split.acc + first * D;
  if (affine) {
    run(ValueSink<D, true>{fold, acc});
  } else {
    run(ValueSink<D, false>{fold, acc});
  }
}

// One unpacked tile for all rows of the block. The next sub-block's scores are computed
// between a sub-block's softmax and its PV: tile loads cannot take data from stores
// that are still in flight, and this gives them time.
template <int D, int kTerms>
inline void attend_tile(const RowBlock& block, int64_t tile_begin, int subtiles,
                        Scratch<D>& scratch, RowState split) {
  SubTile parts[kMaxRows / kSubRows];
  int count = 0;
  for (int sub = 0; sub * kSubRows < block.num_rows; ++sub) {
    parts[count] = sub_tile(block, scratch.rows, sub, tile_begin, subtiles);
    if (parts[count].valid != 0) ++count;
  }
  if (count > 0) score_tile<D>(parts[0], scratch);
  for (int i = 0; i < count; ++i) {
    const SubTile& part = parts[i];
    tile_softmax<kTerms>(part.shape, scratch.rows + part.sub * kSubRows, tile_begin,
                         scratch.softmax, scratch.result);
    if (i + 1 < count) score_tile<D>(parts[i + 1], scratch);
    accumulate_tile<D, kTerms>(part, scratch, split);
  }
}

template <int D>
inline void merge_rows(int num_rows, RowState state, RowState part) {
  alignas(64) const float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  for (int first = 0; first < num_rows; first += 16) {
    const int rows = num_rows - first < 16 ? num_rows - first : 16;
    uint32_t valid = 0;  // an empty part is neutral; a NaN sum is not empty
    for (int r = 0; r < rows; ++r) valid |= uint32_t(part.sum[first + r] != 0) << r;
    const Fold fold = fold_sums(first, rows, valid, part.max + first, part.sum + first,
                                ones, nullptr, state);
    for (int r = 0; r < rows; ++r) {
      if (!(valid >> r & 1)) continue;
      const int64_t row = (first + r) * D;
      for (int d = 0; d < D; d += 16) {
        fold_values(fold, r, state.acc + row + d, load(part.acc + row + d));
      }
    }
  }
}

template <int D>
inline void reset(int num_rows, RowState state) {
  for (int r = 0; r < (num_rows + 15) / 16 * 16; ++r) {
    state.max[r] = -kInf;
    state.sum[r] = 0;
  }
  std::memset(state.acc, 0, num_rows * D * sizeof(float));
}

template <int D>
void attend_rows(const AttentionArgs& args, const RowBlock& block, int begin_tile,
                 int end_tile, RowState total, RowState split) {
  Scratch<D>& scratch = thread_scratch<Scratch<D>>();
  const TileLayout layout(args.cache.format, D, args.cache.block_size);
  const TileReader<D> reader(args, layout, block);
  load_queries<D>(args, block, scratch);
  const Format& format = args.cache.format;
  scratch.softmax.scales.affine_keys = format.key_quantizer == Quantizer::kAffine;
  scratch.softmax.scales.affine_values = format.value_quantizer == Quantizer::kAffine;
  const LogitTerms& logits = args.logits;
  scratch.softmax.terms = {logits.soft_cap > 0 || logits.alibi_slopes != nullptr,
                           logits.soft_cap * kLog2E};
  const TileConfig config;
  int64_t begin = INT64_MAX, end = 0;
  for (int r = 0; r < block.num_rows; ++r) {
    begin = scratch.rows[r].begin < begin ? scratch.rows[r].begin : begin;
    end = scratch.rows[r].end > end ? scratch.rows[r].end : end;
  }
  begin = begin > begin_tile * int64_t{kTileTokens} ? begin
                                                    : begin_tile * int64_t{kTileTokens};
  end = end < end_tile * int64_t{kTileTokens} ? end : end_tile * int64_t{kTileTokens};
  const auto attend = args.fast ? attend_tile<D, 1> : attend_tile<D, 2>;
  int64_t tile = begin / kTileTokens;
  for (; tile * kTileTokens < end; ++tile) {
    const int64_t tile_begin = tile * kTileTokens;
    const int64_t left = end - tile_begin;
    const int tokens = static_cast<int>(left < kTileTokens ? left : kTileTokens);
    const int subtiles = (tokens + kSubtileTokens - 1) / kSubtileTokens;
    load_tile<D>(reader, tile_begin, subtiles, end, scratch);
    attend(block, tile_begin, subtiles, scratch, split);
    if ((tile + 1) % kSplitTiles == 0) {
      merge_rows<D>(block.num_rows, total, split);
      reset<D>(block.num_rows, split);
    }
  }
  // With windows, rows may end before the pass: no split stays open beyond its end.
  if (tile / kSplitTiles < end_tile / kSplitTiles) {
    merge_rows<D>(block.num_rows, total, split);
    reset<D>(block.num_rows, split);
  }
}

}  // namespace
}  // namespace polykv
