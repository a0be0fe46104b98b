// SPDX-License-Identifier: Apache-2.0
// AVX-512 without VNNI (Skylake-X).
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <immintrin.h>

#include "polykv/codebook.h"
#include "polykv/kernel_table.h"
#include "polykv/layout.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx2")
// clang-format off: each file needs what the ones above it define
#include "vec_avx512.h"
#include "reg_avx512.h"
#include "prefetch.h"
#include "math-inl.h"
#include "dense-inl.h"
#include "affine-inl.h"
#include "pack_keys-inl.h"
#include "store-inl.h"
#include "unpack_plain.h"
#include "unpack_avx512.h"
#include "unpack_values-inl.h"
#include "gemm_shape.h"
#include "gemm_blocks.h"
#include "gemm_madd.h"
#include "softmax-inl.h"
#include "tile_reader-inl.h"
#include "seen_tokens.h"
#include "attention-inl.h"
#include "raw_rows-inl.h"
#include "finish-inl.h"
#include "table-inl.h"
// clang-format on
#pragma GCC pop_options

namespace polykv {

const KernelTable& avx512bw_kernels() {
  static const KernelTable table = {
      "avx512bw",
      [] {
        return __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
      },
      store_entry,
      attend_entry<>,
      merge_entry,
      attend_raw_entry,
      finish_entry,
      transform_queries_entry,
  };
  return table;
}

}  // namespace polykv

#endif  // __x86_64__
