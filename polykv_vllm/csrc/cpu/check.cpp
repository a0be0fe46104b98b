// SPDX-License-Identifier: Apache-2.0
// Bounds of slots, lengths and block numbers: one pass per call over small arrays, far
// cheaper here than in Python.
#include "check.h"

#include <cstdio>

#include "polykv/kernel_table.h"

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

const char* check_batch(const AttentionArgs& args) {
  const int64_t block_size = args.cache.block_size;
  for (int r = 0; r < args.num_reqs; ++r) {
    const int64_t first = args.query_start_loc[r], last = args.query_start_loc[r + 1];
    const int64_t seq_len = args.seq_lens[r];
    if (first < 0 || last < first || last > args.num_rows) {
      return report(
          "query_start_loc of request %lld is %lld..%lld, not inside the "
          "%lld rows of query and output",
          r, first, last, args.num_rows);
    }
    if (first == last) continue;  // padding: nothing of it is read
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
    const int64_t begin = args.sliding_window > 0
                              ? seq_len - (last - first) + 1 - args.sliding_window
                              : 0;
    const int64_t tile = begin > 0 ? begin / kTileTokens * kTileTokens : 0;
    for (int64_t b = tile / block_size; b < blocks; ++b) {
      if (table[b] < 0 || table[b] >= args.cache.num_blocks) {
        return report(
            "block %lld in entry %lld of request %lld lies outside the "
            "cache's %lld blocks",
            table[b], b, r, args.cache.num_blocks);
      }
    }
  }
  return nullptr;
}

}  // namespace polykv
