// SPDX-License-Identifier: Apache-2.0
// AVX-512 with AMX int8 tiles (Sapphire Rapids upwards).
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <immintrin.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "polykv/codebook.h"
#include "polykv/kernel_table.h"
#include "polykv/layout.h"

#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8,fma,avx2")
// clang-format off: each file needs what the ones above it define
#include "vec_avx512.h"
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
#include "gemm_amx.h"
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

// CPUID tells of the instructions; the kernel grants the tile registers on request,
// once per process.
bool amx_usable() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d >> 24 & 1, int8 = d >> 25 & 1;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return tile && int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Few rows leave most of a tile idle: vector products are faster then, and give the
// same integers, hence the same bits.
constexpr int kMinTileRows = 5;

void attend_tiles(const AttentionArgs& args, const RowBlock& rows, int begin_tile,
                  int end_tile, RowState total, RowState split) {
  if (rows.num_rows < kMinTileRows) {
    avx512_kernels().attend(args, rows, begin_tile, end_tile, total, split);
  } else {
    attend_entry<avx512_kernels>(args, rows, begin_tile, end_tile, total, split);
  }
}

}  // namespace

const KernelTable& amx_kernels() {
  const KernelTable& base = avx512_kernels();
  static const KernelTable table = {
      "amx",       [] { return avx512_kernels().supported() && amx_usable(); },
      base.store,  attend_tiles,
      base.merge,  base.attend_raw,
      base.finish, base.transform_queries,
  };
  return table;
}

}  // namespace polykv

#endif  // __x86_64__
