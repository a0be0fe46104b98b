// SPDX-License-Identifier: Apache-2.0
// NEON with dot products of mixed signs (i8mm: Neoverse V1 and N2, Graviton 3 upwards).
#if defined(__aarch64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "polykv/codebook.h"
#include "polykv/kernel_table.h"
#include "polykv/layout.h"

#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#define POLYKV_I8MM
// clang-format off: each file needs what the ones above it define
#include "vec_neon.h"
#include "reg_neon.h"
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

const KernelTable& neon_i8mm_kernels() {
  static const KernelTable table = {
      "neon_i8mm",
      [] {
        return neon_kernels().supported() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
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

#endif  // __aarch64__
