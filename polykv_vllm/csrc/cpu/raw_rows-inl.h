// SPDX-License-Identifier: Apache-2.0
// Attention to raw keys and values: the tokens that a row's windows let it see as the
// model made them. The result is one softmax state of its own, in the values' space.
//
// Tokens come in granules that lie at fixed positions of the sequence, those of the
// sinks first; a granule's scores, sum and weighted values are those of the row's own
// tokens, in ascending order, and fold into the state as a tile's do. So a row's bits
// depend on its tokens alone: not on where their copies are, nor on other rows.
#pragma once

namespace polykv {
namespace {

constexpr int kGranuleTokens = kWindowPageTokens;

template <int D>
struct RawScratch {
  alignas(64) float query[kMaxRows * D];
  alignas(64) float key[kGranuleTokens * D];
  alignas(64) float value[kGranuleTokens * D];
  alignas(64) float x[kSubRows * kGranuleTokens];  // scores, then weights
  alignas(64) float top[kSubRows][16];             // lane-wise maxima of the scores
  SeenTokens seen[kMaxRows];
  RowParams rows[kMaxRows];  // begin, end: of the span that is attended to
};

// The raw rows that one request sees of one KV head.
struct RawReader {
  const AttentionArgs& args;
  int request, kv_head;
  int64_t first_token, context;  // row of the chunk's first token; tokens before it

  RawReader(const AttentionArgs& args, int request, int kv_head)
      : args(args), request(request), kv_head(kv_head) {
    first_token = args.query_start_loc[request];
    const int64_t query_len = args.query_start_loc[request + 1] - first_token;
    context = args.seq_lens[request] - query_len;
  }

  // The page with `token`, which lies before the chunk.
  int64_t page(int64_t token, bool is_sink) const {
    const Windows& windows = args.windows;
    const int64_t granule = token / kGranuleTokens;
    if (is_sink) {
      return windows.sink_pages[request * windows.sink_pages_stride + granule];
    }
    const int64_t first = windows.recent_begin[request] / kGranuleTokens;
    return windows
        .recent_pages[request * windows.recent_pages_stride + granule - first];
  }

  // Converts tokens begin..end, all of one granule, to fp32, at their places in it.
  template <int D>
  void load(int64_t begin, int64_t end, bool is_sink, float* key, float* value) const {
    const RawRows& raw = args.raw;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t place = token % kGranuleTokens;
      int64_t key_index, value_index;
      const void *keys = raw.cache, *values = raw.cache;
      if (token < context) {
        key_index = page(token, is_sink) * raw.page_stride + kv_head * raw.head_stride +
                    place * D;
        value_index = key_index + raw.kind_stride;
      } else {
        const int64_t row = first_token + token - context;
        keys = raw.key;
        values = raw.value;
        key_index = row * raw.key_token_stride + kv_head * raw.key_head_stride;
        value_index = row * raw.value_token_stride + kv_head * raw.value_head_stride;
      }
      load_row<D>(key + place * D, keys, key_index, args.dtype);
      // What cached keys lack, so that both kinds are of one softmax.
      if (args.query_transform.centers) {
        subtract<D>(key + place * D, args.query_transform.centers + kv_head * D);
      }
      load_row<D>(value + place * D, values, value_index, args.dtype);
    }
  }
};

// Products of a query with 16 keys: lane-wise chains over ascending elements, summed as
// in reduce_add.
template <int D>
inline VecF dot_keys(const float* query, const float* keys) {
  VecF quads[4];
  const auto plus = [](VecF a, VecF b) { return add(a, b); };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    VecF sum[4];  // tokens i, i + 4, i + 8, i + 12
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[j] = set1(0.0f);
    for (int d = 0; d < D; d += 16) {
      const VecF q = load(query + d);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        sum[j] = fma(q, load(keys + (i + 4 * j) * D + d), sum[j]);
      }
    }
    quads[i] = combine<4>(combine<8>(sum[0], sum[2], plus),
                          combine<8>(sum[1], sum[3], plus), plus);
  }
  const VecF even = combine<2>(quads[0], quads[2], plus);
  return combine<1>(even, combine<2>(quads[1], quads[3], plus), plus);
}

// Replaces scores by weights relative to `peak`; returns their lane-wise sums. Tokens
// that the row does not see are selected out.
inline VecF weigh_raw(float peak, int64_t begin, int64_t end, float* x) {
  VecF sum = set1(0.0f);
  for (int t = 0; t < kGranuleTokens; t += 16) {
    const VecF weight = select(tokens_mask(begin, end, t),
                               exp2(sub(load(x + t), set1(peak))), set1(0.0f));
    store(x + t, weight);
    sum = add(sum, weight);
  }
  return sum;
}

// Adds tokens begin..end, weighted, to kRows rows: one chain over ascending tokens for
// each element, which then folds into the row's state.
template <int D, int kRows>
inline void add_raw_values(const float* x, const float* values, int begin, int end,
                           const Fold& fold, int row, float* acc) {
  constexpr int kVectors = D % 32 == 0 ? 2 : 1;
  for (int first = 0; first < D; first += 16 * kVectors) {
    VecF sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = set1(0.0f);
    }
    for (int t = begin; t < end; ++t) {
      VecF value[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        value[v] = load(values + t * D + first + v * 16);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const VecF weight = set1(x[r * kGranuleTokens + t]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        fold_values(fold, row + r, acc + r * D + first + v * 16, sum[r][v]);
      }
    }
  }
}

// Rows of one sub-block: lane or bit r is row r.
template <int D>
struct RawTile {
  RawScratch<D>& scratch;
  int first, rows;  // of the sub-block
  int64_t base;     // the granule's first token
  uint32_t valid = 0;

  RowParams& row(int r) { return scratch.rows[first + r]; }
  // A row's tokens, counted from the granule's first.
  int begin(int r) { return static_cast<int>(larger(row(r).begin - base, 0)); }
  int end(int r) {
    return static_cast<int>(smaller(row(r).end - base, kGranuleTokens));
  }

  void attend(const ScoreTerms& terms, RowState state) {
    for (int r = 0; r < rows; ++r) valid |= uint32_t(begin(r) < end(r)) << r;
    if (valid == 0) return;
    alignas(64) static constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1,
                                                    1, 1, 1, 1, 1, 1, 1, 1};
    alignas(64) float peak[16], sum[16];
    weigh(terms, peak, sum);
    const Fold fold = fold_sums(first, rows, valid, peak, sum, kOnes, nullptr, state);
    for (int r = 0; r < rows;) r += add_values(fold, r, state.acc + (first + r) * D);
  }

  void weigh(const ScoreTerms& terms, float* peak, float* sum) {
    VecF lanes[kSubRows];
    for (int r = 0; r < kSubRows; ++r) lanes[r] = set1(-kInf);
    for (int r = 0; r < rows; ++r) {
      if (!(valid >> r & 1)) continue;
      float* x = scratch.x + r * kGranuleTokens;
      for (int t = 0; t < kGranuleTokens; t += 16) {
        store(x + t, dot_keys<D>(scratch.query + (first + r) * D, scratch.key + t * D));
      }
      apply_terms(terms, row(r), base, kGranuleTokens / 16, x, scratch.top[r]);
      lanes[r] = load(scratch.top[r]);
    }
    store(peak, reduce_max_rows(lanes));
    for (int r = 0; r < kSubRows; ++r) {
      lanes[r] =
          r < rows && (valid >> r & 1)
              ? weigh_raw(peak[r], begin(r), end(r), scratch.x + r * kGranuleTokens)
              : set1(0.0f);
    }
    store(sum, reduce_add_rows(lanes));
  }

  // Rows from r on that see the same tokens are served at once; returns how many.
  int add_values(const Fold& fold, int r, float* acc) {
    if (!(valid >> r & 1)) return 1;
    int count = 1;
    while (count < 4 && r + count < rows && (valid >> (r + count) & 1) &&
           begin(r + count) == begin(r) && end(r + count) == end(r)) {
      ++count;
    }
    const float* x = scratch.x + r * kGranuleTokens;
    const auto add = [&](auto number) {
      add_raw_values<D, number>(x, scratch.value, begin(r), end(r), fold, r, acc);
      return int{number};
    };
    if (count == 4) return add(std::integral_constant<int, 4>{});
    if (count >= 2) return add(std::integral_constant<int, 2>{});
    return add(std::integral_constant<int, 1>{});
  }
};

// Folds one span of every row, of the sinks or of the recent tokens, into the states.
template <int D>
inline void attend_span(const RawReader& reader, TokenSpan SeenTokens::* span,
                        int num_rows, const ScoreTerms& terms, RawScratch<D>& scratch,
                        RowState state) {
  const bool is_sink = span == &SeenTokens::sinks;
  int64_t begin = INT64_MAX, end = 0;
  for (int r = 0; r < num_rows; ++r) {
    TokenSpan tokens = scratch.seen[r].*span;
    if (tokens.empty()) tokens = {0, 0};
    scratch.rows[r].begin = tokens.begin;
    scratch.rows[r].end = tokens.end;
    if (tokens.empty()) continue;
    begin = smaller(begin, tokens.begin);
    end = larger(end, tokens.end);
  }
  for (int64_t low = begin; low < end;) {
    const int64_t base = low / kGranuleTokens * kGranuleTokens;
    const int64_t high = smaller(base + kGranuleTokens, end);
    reader.load<D>(low, high, is_sink, scratch.key, scratch.value);
    for (int first = 0; first < num_rows; first += kSubRows) {
      const int left = num_rows - first;
      RawTile<D>{scratch, first, left < kSubRows ? left : kSubRows, base}.attend(terms,
                                                                                 state);
    }
    low = high;
  }
}

template <int D>
inline void load_raw_queries(const AttentionArgs& args, const RawReader& reader,
                             const RowRun& run, RawScratch<D>& scratch) {
  const int group = args.num_heads / args.cache.num_kv_heads;
  const LogitTerms& logits = args.logits;
  for (int r = 0; r < run.num_rows; ++r) {
    const int64_t token = (run.row_begin + r) / group;
    const int64_t head = reader.kv_head * group + (run.row_begin + r) % group;
    load_row<D>(scratch.query + r * D, args.query,
                (reader.first_token + token) * args.query_token_stride +
                    head * args.query_head_stride,
                args.query_dtype);
    RowParams& row = scratch.rows[r];
    row.scale = args.scale * kLog2E;
    row.to_tanh = logits.soft_cap > 0 ? args.scale / logits.soft_cap : 0.0f;
    row.slope = logits.alibi_slopes ? logits.alibi_slopes[head] * kLog2E : 0.0f;
    row.position = reader.context + token;
    scratch.seen[r] = seen_tokens(args, run.request, row.position);
  }
}

template <int D>
inline void attend_raw(const AttentionArgs& args, const RowBlock& block,
                       RowState state) {
  RawScratch<D>& scratch = thread_scratch<RawScratch<D>>();
  const LogitTerms& logits = args.logits;
  const ScoreTerms terms = {true, logits.soft_cap * kLog2E};
  const RowRun& run = block.runs[0];
  const RawReader reader(args, run.request, block.kv_head);
  load_raw_queries<D>(args, reader, run, scratch);
  for (const auto span : {&SeenTokens::sinks, &SeenTokens::recent}) {
    attend_span<D>(reader, span, run.num_rows, terms, scratch, state);
  }
}

}  // namespace
}  // namespace polykv
