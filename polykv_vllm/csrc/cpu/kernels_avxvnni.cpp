// SPDX-License-Identifier: Apache-2.0
// AVX2 with byte products of 256 bits (AVX-VNNI: Alder Lake and Zen 5 upwards).
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <cpuid.h>
#include <immintrin.h>

#include "polykv/codebook.h"
#include "polykv/kernel_table.h"
#include "polykv/layout.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define POLYKV_DOT  // dot products of bytes: GCC 12 tells of no target in its macros
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
namespace {

// Bit 4 of EAX, leaf 7, subleaf 1: a name that GCC 12's check does not know.
bool has_avxvnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

}  // namespace

const KernelTable& avxvnni_kernels() {
  const KernelTable& base = avx2_kernels();
  static const KernelTable table = {
      "avxvnni",   [] { return avx2_kernels().supported() && has_avxvnni(); },
      base.store,  attend_entry<>,
      base.merge,  base.attend_raw,
      base.finish, base.transform_queries,
  };
  return table;
}

}  // namespace polykv

#endif  // __x86_64__
