// SPDX-License-Identifier: Apache-2.0
// Instantiates the kernels for every head dimension behind the table's signatures.
#pragma once

namespace polykv {
namespace {

void store_entry(const StoreArgs& args, int64_t begin, int64_t end) {
  store_tokens(args, begin, end);
}

void attend_entry(const AttentionArgs& args, const RowBlock& rows, int begin_tile,
                  int end_tile, RowState total, RowState split) {
  switch (args.cache.head_dim) {
    case 64:
      return attend_rows<64>(args, rows, begin_tile, end_tile, total, split);
    case 128:
      return attend_rows<128>(args, rows, begin_tile, end_tile, total, split);
    default:
      return attend_rows<256>(args, rows, begin_tile, end_tile, total, split);
  }
}

void merge_entry(int num_rows, int head_dim, RowState state, RowState part) {
  switch (head_dim) {
    case 64:
      return merge_rows<64>(num_rows, state, part);
    case 128:
      return merge_rows<128>(num_rows, state, part);
    default:
      return merge_rows<256>(num_rows, state, part);
  }
}

void finish_entry(const AttentionArgs& args, const RowBlock& rows, RowState state) {
  switch (args.cache.head_dim) {
    case 64:
      return finish_rows<64>(args, rows, state);
    case 128:
      return finish_rows<128>(args, rows, state);
    default:
      return finish_rows<256>(args, rows, state);
  }
}

void transform_queries_entry(const AttentionArgs& args, int64_t begin, int64_t end,
                             float* out) {
  switch (args.cache.head_dim) {
    case 64:
      return transform_queries<64>(args, begin, end, out);
    case 128:
      return transform_queries<128>(args, begin, end, out);
    default:
      return transform_queries<256>(args, begin, end, out);
  }
}

}  // namespace
}  // namespace polykv
