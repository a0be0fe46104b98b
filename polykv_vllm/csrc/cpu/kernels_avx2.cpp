// SPDX-License-Identifier: Apache-2.0
// AVX2 (Haswell and Zen upwards).
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
#pragma GCC target("avx2,fma,f16c")
// clang-format off: each file needs what the ones above it define
#include "vec_avx2.h"
#include "reg_avx2.h"
#include "prefetch.h"
#include "math-inl.h"
#include "dense-inl.h"
#include "affine-inl.h"
#include "pack_keys-inl.h"
#include "store-inl.h"
#include "unpack_plain.h"
#include "unpack_bytes.h"
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

const KernelTable& avx2_kernels() {
  static const KernelTable table = {
      "avx2",
      [] {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
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
