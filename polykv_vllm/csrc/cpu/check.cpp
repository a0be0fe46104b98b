// SPDX-License-Identifier: Apache-2.0
// Bounds of slots, lengths and block numbers: one pass per call over small arrays, far
// cheaper here than in Python.
#include "check.h"

#include <cstdio>
#include <vector>

#include "polykv/kernel_table.h"
#include "seen_tokens.h"

namespace polykv {
namespace {

template <typename... Args>
const char* report(const char* format, Args... args) {
  static thread_local char text[256];
  std::snprintf(text, sizeof(text), format, static_cast<long long>(args)...);
  return text;
}

}  // namespace

const char* check_slots(const StoreArgs& args) {
  const int64_t limit = args.cache.num_blocks * args.cache.block_size;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    if (args.slot_mapping[t] >= limit) {
      return report("slot %lld of token %lld lies outside the cache's %lld slots",
                    args.slot_mapping[t], t, limit);
    }
  }
  return nullptr;
}

namespace {

const char* check_request(const AttentionArgs& args, int r) {
  const int64_t block_size = args.cache.block_size;
  const int64_t first = args.query_start_loc[r], last = args.query_start_loc[r + 1];
  const int64_t seq_len = args.seq_lens[r];
  if (first < 0 || last < first || last > args.num_rows) {
    return report(
        "query_start_loc of request %lld is %lld..%lld, not inside the "
        "%lld rows of query and output",
        r, first, last, args.num_rows);
  }
  if (first == last) return nullptr;  // padding: nothing of it is read
  if (last - first > seq_len) {
    return report("request %lld has %lld query tokens but only %lld cached ones", r,
                  last - first, seq_len);
  }
  const int64_t blocks = (seq_len + block_size - 1) / block_size;
  if (blocks > args.block_table_width) {
    return report(
        "request %lld has %lld tokens, more than the %lld blocks of its "
        "block table hold",
        r, seq_len, args.block_table_width);
  }
  const int32_t* table = args.block_table + r * args.block_table_stride;
  // Tiles that the window has left behind are not read, nor are their blocks.
  const int64_t begin =
      args.sliding_window > 0 ? seq_len - (last - first) + 1 - args.sliding_window : 0;
  const int64_t tile = begin > 0 ? begin / kTileTokens * kTileTokens : 0;
  for (int64_t b = tile / block_size; b < blocks; ++b) {
    if (table[b] < 0 || table[b] >= args.cache.num_blocks) {
      return report(
          "block %lld in entry %lld of request %lld lies outside the "
          "cache's %lld blocks",
          table[b], b, r, args.cache.num_blocks);
    }
  }
  return nullptr;
}

// Pages of the granules of tokens begin..end, `pages` beginning at granule `first`.
const char* check_pages(const AttentionArgs& args, int r, TokenSpan tokens,
                        const int32_t* pages, int64_t first, int64_t width) {
  if (tokens.empty()) return nullptr;
  for (int64_t granule = tokens.begin / kWindowPageTokens;
       granule * kWindowPageTokens < tokens.end; ++granule) {
    const int64_t page = granule - first < width ? pages[granule - first] : -1;
    if (page < 0 || page >= args.raw.num_pages) {
      return report(
          "page %lld of tokens %lld.. of request %lld is none of the window "
          "cache's %lld",
          page, granule * kWindowPageTokens, r, args.raw.num_pages);
    }
  }
  return nullptr;
}

const char* check_windows(const AttentionArgs& args, int r) {
  const Windows& windows = args.windows;
  const int64_t first = args.query_start_loc[r], last = args.query_start_loc[r + 1];
  const int64_t context = args.seq_lens[r] - (last - first);
  const int64_t sinks = windows.sink_tokens[r], recent = windows.recent_begin[r];
  if (first == last) return nullptr;
  if (sinks < 0 || recent < 0 || recent > context) {
    return report(
        "request %lld with %lld tokens before its chunk has %lld sink tokens and "
        "recent tokens from %lld on",
        r, context, sinks, recent);
  }
  // Later rows see no earlier tokens, and new sinks only in the chunk.
  const SeenTokens seen = seen_tokens(args, r, context);
  if (const char* error =
          check_pages(args, r, {seen.sinks.begin, smaller(sinks, context)},
                      windows.sink_pages + r * windows.sink_pages_stride, 0,
                      windows.sink_pages_width)) {
    return error;
  }
  return check_pages(args, r, {seen.recent.begin, context},
                     windows.recent_pages + r * windows.recent_pages_stride,
                     recent / kWindowPageTokens, windows.recent_pages_width);
}

bool same_blocks(const AttentionArgs& args, int a, int b, int64_t begin, int64_t end) {
  const int64_t block_size = args.cache.block_size;
  const int32_t* left = args.block_table + a * args.block_table_stride;
  const int32_t* right = args.block_table + b * args.block_table_stride;
  for (int64_t i = begin / block_size; i * block_size < end; ++i) {
    if (left[i] != right[i]) return false;
  }
  return true;
}

// Tiles that every query row of a request sees to their end.
int64_t full_tiles(const AttentionArgs& args, int r) {
  const int64_t query_len = args.query_start_loc[r + 1] - args.query_start_loc[r];
  return query_len > 0 ? (args.seq_lens[r] - query_len + 1) / kTileTokens : 0;
}

// `next_tile`: of each request, where its last segment ended.
const char* check_segment(const AttentionArgs& args, int s,
                          std::vector<int32_t>& next_tile) {
  const SharedSegment& segment = args.segments[s];
  const int64_t first = segment.first_reader, count = segment.num_readers;
  if (segment.begin_tile < 0 || segment.begin_tile >= segment.end_tile || first < 0 ||
      count < 1 || first + count > args.num_readers) {
    return report("shared segment %lld has tiles %lld..%lld and readers %lld..%lld", s,
                  segment.begin_tile, segment.end_tile, first, first + count);
  }
  for (int64_t i = first; i < first + count; ++i) {
    const int32_t reader = args.readers[i];
    if (reader < 0 || reader >= args.num_reqs ||
        segment.begin_tile < next_tile[reader] ||
        segment.end_tile > full_tiles(args, reader)) {
      return report("shared segment %lld of tiles %lld..%lld does not fit request %lld",
                    s, segment.begin_tile, segment.end_tile, reader);
    }
    next_tile[reader] = segment.end_tile;
    if (!same_blocks(args, args.readers[first], reader,
                     int64_t{segment.begin_tile} * kTileTokens,
                     int64_t{segment.end_tile} * kTileTokens)) {
      return report("requests %lld and %lld do not share the blocks of segment %lld",
                    args.readers[first], reader, s);
    }
  }
  return nullptr;
}

}  // namespace

const char* check_batch(const AttentionArgs& args) {
  for (int r = 0; r < args.num_reqs; ++r) {
    if (const char* error = check_request(args, r)) return error;
    if (args.windows.sink_tokens == nullptr) continue;
    if (const char* error = check_windows(args, r)) return error;
  }
  if (args.num_segments == 0) return nullptr;
  std::vector<int32_t> next_tile(args.num_reqs, 0);
  for (int s = 0; s < args.num_segments; ++s) {
    if (const char* error = check_segment(args, s, next_tile)) return error;
  }
  return nullptr;
}

}  // namespace polykv
