// SPDX-License-Identifier: Apache-2.0
// Plain C++: runs everywhere and specifies what the others compute.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "polykv/codebook.h"
#include "polykv/kernel_table.h"
#include "polykv/layout.h"

// clang-format off: each file needs what the ones above it define
#include "vec_scalar.h"
#include "prefetch.h"
#include "math-inl.h"
#include "dense-inl.h"
#include "affine-inl.h"
#include "pack_keys-inl.h"
#include "store-inl.h"
#include "unpack_plain.h"
#include "unpack_scalar.h"
#include "gemm_shape.h"
#include "gemm_scalar.h"
#include "softmax-inl.h"
#include "tile_reader-inl.h"
#include "seen_tokens.h"
#include "attention-inl.h"
#include "raw_rows-inl.h"
#include "finish-inl.h"
#include "table-inl.h"
// clang-format on

namespace polykv {

const KernelTable& scalar_kernels() {
  static const KernelTable table = {
      "scalar",    [] { return true; }, store_entry,  attend_entry<>,
      merge_entry, attend_raw_entry,    finish_entry, transform_queries_entry,
  };
  return table;
}

}  // namespace polykv
