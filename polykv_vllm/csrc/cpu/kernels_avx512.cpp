// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI (Cascade Lake and Zen 4 upwards).
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
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,avx2")
#define POLYKV_DOT  // dot products of bytes: GCC 12 tells of no target in its macros
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
#include "gemm_dot.h"
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

const KernelTable& avx512_kernels() {
  const KernelTable& base = avx512bw_kernels();
  static const KernelTable table = {
      "avx512",
      [] {
        return __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
      },
      base.store,
      attend_entry<>,
      base.merge,
      base.attend_raw,
      base.finish,
      base.transform_queries,
  };
  return table;
}

}  // namespace polykv

#endif  // __x86_64__
