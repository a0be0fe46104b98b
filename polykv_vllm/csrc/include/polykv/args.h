// SPDX-License-Identifier: Apache-2.0
// The C interface: plain structs that ops/cpu.py mirrors with ctypes. No torch, so
// one build of the library serves every torch, on CPU and CUDA machines alike.
#pragma once

#include <cstdint>

namespace polykv {

enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// How a row becomes codes, as Quantizer in formats/registry.py.
enum class Quantizer : int32_t { kSymmetric = 0, kCodebook = 1, kAffine = 2 };

// What a format is, as FormatSpec in formats/registry.py.
struct Format {
  int32_t key_bits;    // 2, 3, 4, 7 or 8
  int32_t value_bits;  // 2, 3, 4 or 8
  int32_t rotate;      // 1: values are rotated by the orthonormal Hadamard matrix
  Quantizer key_quantizer;
  Quantizer value_quantizer;
  // Affine rows are clipped to their magnitude of this place in ascending order;
  // head_dim - 1: they are not.
  int32_t key_clip, value_clip;
};

// The paged cache: uint8 [num_blocks, num_kv_heads, block_size, slot_bytes]; the tile
// of one (block, head) is contiguous, its order is layout.h's.
struct Cache {
  uint8_t* data;
  int64_t num_blocks;
  int64_t block_stride;  // bytes
  int64_t head_stride;   // bytes
  int32_t num_kv_heads;
  int32_t block_size;  // tokens, a multiple of 16
  int32_t head_dim;
  Format format;
};

// What happens to a row in fp32 before it is quantized: keys and queries are
// transformed so that their products stay what they were, but for a number per query
// that centred keys lack (keys/transform.py).
struct RowTransform {
  const float* centers;      // [num_kv_heads, head_dim] or null: subtracted from keys
                             // before all else; of queries, what their keys lack
  const float* multipliers;  // [num_kv_heads, head_dim], or null for all ones
  const float* matrices;     // [num_kv_heads, input, output] instead, or null
  int32_t rotate;            // 1: the orthonormal Hadamard matrix follows
};

// Quantize `num_tokens` rows and scatter them by slot; a slot < 0 is skipped.
struct StoreArgs {
  Cache cache;
  const void* key;              // [num_tokens, num_kv_heads, head_dim] dtype
  const void* value;            // same shape and dtype
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;           // rows of key and value are at least as many
  int64_t key_token_stride, key_head_stride;  // elements
  int64_t value_token_stride, value_head_stride;
  RowTransform key_transform;
  DType dtype;
  int32_t num_threads;
};

// Tiles begin..end (exclusive) of the sequences of several requests lie in the same
// blocks: they are read once for all of these.
struct SharedSegment {
  int32_t begin_tile, end_tile;
  int32_t first_reader, num_readers;  // a range of `readers`
};

// What a layer does to its logits q.k * scale besides a softmax (ops/logits.py).
struct LogitTerms {
  const float* alibi_slopes;  // [num_heads]: slope * (key - query position) is added
  const float* sinks;         // [num_heads]: logits that only the denominator counts
  float soft_cap;             // > 0: logits become cap * tanh(logit / cap), first
};

// Tokens of a page of raw keys and values.
constexpr int kWindowPageTokens = 32;

// Which tokens each request's queries see as the model made them, and where copies of
// those before the chunk are (ops/windows.py).
struct Windows {
  const int32_t* sink_tokens;   // [num_reqs], or null: there are no windows
  const int32_t* recent_begin;  // [num_reqs]
  const int32_t* sink_pages;    // [num_reqs, sink_pages_stride]
  const int32_t* recent_pages;  // [num_reqs, recent_pages_stride]
  int64_t sink_pages_stride, recent_pages_stride;  // elements
  int32_t sink_pages_width, recent_pages_width;
  int32_t recent_tokens;
};

// Raw keys and values of one layer, in the dtype of the output.
struct RawRows {
  const void* key;    // [num_tokens, num_kv_heads, head_dim]: the chunk's
  const void* value;  // same shape
  const void* cache;  // [num_pages, 2, num_kv_heads, kWindowPageTokens, head_dim]
  int64_t key_token_stride, key_head_stride;  // elements
  int64_t value_token_stride, value_head_stride;
  int64_t num_pages;
  int64_t page_stride, kind_stride, head_stride;
};

// Causal attention of the query rows of `num_reqs` requests over their cached tokens.
struct AttentionArgs {
  Cache cache;
  const void* query;               // [num_tokens, num_heads, head_dim] query_dtype
  void* output;                    // same shape, dtype
  const int32_t* block_table;      // [num_reqs, block_table_stride]
  const int32_t* seq_lens;         // [num_reqs] cached tokens, the queries' included
  const int32_t* query_start_loc;  // [num_reqs + 1]
  int64_t query_token_stride, query_head_stride;  // elements
  int64_t output_token_stride, output_head_stride;
  const SharedSegment* segments;  // [num_segments]; of one request: ascending
  const int32_t* readers;         // requests, each once per segment
  int64_t num_readers;            // length of `readers`
  int64_t block_table_stride;     // elements
  int64_t num_rows;  // token rows of query and output, for the bounds check
  RowTransform query_transform;
  LogitTerms logits;
  Windows windows;
  RawRows raw;
  int32_t block_table_width;  // elements
  int32_t num_reqs;
  int32_t num_segments;
  int32_t num_heads;
  int32_t sliding_window;  // keys a query sees, itself included; <= 0: all
  DType dtype;             // of the output
  DType query_dtype;
  float scale;
  int32_t fast;  // 1: probabilities in 8 bits, not 16
  int32_t num_threads;
};

}  // namespace polykv
