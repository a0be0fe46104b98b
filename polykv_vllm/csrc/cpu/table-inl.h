// SPDX-License-Identifier: Apache-2.0
// Instantiates the kernels for every head dimension behind the table's signatures.
// A table whose instruction set adds only integer products takes all but `attend` from
// the one below it: inline, what is not taken is not compiled.
#pragma once

namespace polykv {
namespace {

inline void store_entry(const StoreArgs& args, int64_t begin, int64_t end) {
  store_tokens(args, begin, end);
}

// Calls fn with the head dimension as a constant if the products here serve it; returns
// whether they do.
template <typename Fn>
bool with_own_head_dim(int head_dim, Fn fn) {
  bool served = false;
  with_head_dim(head_dim, [&](auto dim) {
    if constexpr (dim % kHeadDimStep == 0) {
      fn(dim);
      served = true;
    }
  });
  return served;
}

// Other head dimensions are left to `kOther`, which gives the same bits.
template <const KernelTable& (*kOther)() = scalar_kernels>
void attend_entry(const AttentionArgs& args, const RowBlock& rows, int begin_tile,
                  int end_tile, RowState total, RowState split) {
  const bool served = with_own_head_dim(args.cache.head_dim, [&](auto dim) {
    attend_rows<dim>(args, rows, begin_tile, end_tile, total, split);
  });
  if (!served) kOther().attend(args, rows, begin_tile, end_tile, total, split);
}

inline void merge_entry(int num_rows, int head_dim, RowState state, RowState part) {
  with_head_dim(head_dim, [&](auto dim) { merge_rows<dim>(num_rows, state, part); });
}

inline void attend_raw_entry(const AttentionArgs& args, const RowBlock& rows,
                             RowState raw) {
  with_head_dim(args.cache.head_dim,
                [&](auto dim) { attend_raw<dim>(args, rows, raw); });
}

inline void finish_entry(const AttentionArgs& args, const RowBlock& rows,
                         RowState state, RowState raw) {
  with_head_dim(args.cache.head_dim,
                [&](auto dim) { finish_rows<dim>(args, rows, state, raw); });
}

inline void transform_queries_entry(const AttentionArgs& args, int64_t begin,
                                    int64_t end, float* out) {
  with_head_dim(args.cache.head_dim,
                [&](auto dim) { transform_queries<dim>(args, begin, end, out); });
}

}  // namespace
}  // namespace polykv
