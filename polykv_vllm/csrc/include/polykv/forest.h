// SPDX-License-Identifier: Apache-2.0
// The prefix forest of a batch: which requests read the same blocks.
#pragma once

#include <cstdint>

#include "polykv/args.h"

namespace polykv {

// Why a cached token that a query attends to was not read through a shared segment.
enum Unshared : int32_t {
  kOwnToken = 0,   // it is one of the tokens that the request computes in this step
  kNoOtherReader,  // no other request of the batch has its tile
  kNoGain,         // others have it, but stacking the rows would save no pass
  kNumUnshared,
};

// Pairs of (query token, cached token) of a batch, and sizes of its shared segments.
struct SharingStats {
  int64_t shared_pairs;
  int64_t unshared_pairs[kNumUnshared];
  int64_t distinct_prefixes;  // segments that no other one continues
  int64_t max_readers;        // of a segment
  int64_t physical_tokens;    // of all segments, each once
  int64_t logical_tokens;     // the same once for each reader
};

struct ForestArgs {
  const int32_t* block_table;      // [num_reqs, block_table_stride]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* query_start_loc;  // [num_reqs + 1]
  SharedSegment* segments;         // out, [max_segments]
  int32_t* readers;                // out, [max_readers]
  SharingStats* stats;             // out
  int64_t block_table_stride;      // elements
  int64_t max_segments, max_readers;
  int32_t block_table_width;  // elements
  int32_t num_reqs;
  int32_t block_size;  // tokens
  int32_t group;       // query heads per KV head
  int32_t sliding_window;
};

// Fills segments and readers; returns the number of segments, or -1 when they do not
// fit (num_reqs * tiles readers always do).
int64_t build_forest(const ForestArgs& args);

}  // namespace polykv
