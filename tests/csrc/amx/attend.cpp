// SPDX-License-Identifier: Apache-2.0
// Attends over random caches with the kernels' own source and writes the softmax states
// to standard output. With -DEMULATED_TILES the products are gemm_amx.h on emulated
// tiles, else gemm_scalar.h: all else is the same, so the outputs have to be.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "polykv/codebook.h"
#include "polykv/kernel_table.h"
#include "polykv/layout.h"

// clang-format off: each file needs what the ones above it define
#include "cpu/vec_scalar.h"
#include "cpu/prefetch.h"
#include "cpu/math-inl.h"
#include "cpu/dense-inl.h"
#include "cpu/affine-inl.h"
#include "cpu/pack_keys-inl.h"
#include "cpu/store-inl.h"
#include "cpu/unpack_plain.h"
#include "cpu/unpack_scalar.h"
#include "cpu/gemm_shape.h"
#ifdef EMULATED_TILES
#include "tiles.h"
#include "cpu/gemm_amx.h"
#else
#include "cpu/gemm_scalar.h"
#endif
#include "cpu/softmax-inl.h"
#include "cpu/tile_reader-inl.h"
#include "cpu/seen_tokens.h"
#include "cpu/attention-inl.h"
// clang-format on

#include "../random.h"
#include "cpu/row_states.h"

using namespace polykv;

namespace {

constexpr int kBlockSize = 32;

// A cache of one sequence whose codes are random bytes. Scales are bf16 of 2^-7 to
// 2^-6.
std::vector<uint8_t> random_cache(const TileLayout& layout, int blocks,
                                  Random& random) {
  std::vector<uint8_t> bytes(blocks * layout.tile_bytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
  for (int block = 0; block < blocks; ++block) {
    uint8_t* tile = bytes.data() + block * layout.tile_bytes;
    for (int64_t at = layout.key_scales; at < layout.tile_bytes; at += 2) {
      const auto scale = static_cast<uint16_t>(0x3c00 | (random.bits() & 0x7f));
      std::memcpy(tile + at, &scale, 2);
    }
  }
  return bytes;
}

// The last `rows` tokens of a sequence of `length` ask, one head each.
template <int D>
void attend_case(const Format& format, int rows, int length, int window, bool fast,
                 Random& random) {
  const TileLayout layout(format, D, kBlockSize);
  const int blocks = (length + kBlockSize - 1) / kBlockSize;
  std::vector<uint8_t> bytes = random_cache(layout, blocks, random);
  std::vector<int32_t> table(blocks);
  for (int i = 0; i < blocks; ++i) table[i] = blocks - 1 - i;
  std::vector<float> query(rows * D), output(rows * D);
  for (float& x : query) x = static_cast<float>(random.bits() >> 40) / (1 << 23) - 1;
  const int32_t starts[2] = {0, rows};
  AttentionArgs args{};
  args.cache = {
      bytes.data(), blocks, layout.tile_bytes, layout.tile_bytes, 1, kBlockSize, D,
      format};
  args.query = query.data();
  args.output = output.data();
  args.block_table = table.data();
  args.seq_lens = &length;
  args.query_start_loc = starts;
  args.query_token_stride = args.query_head_stride = D;
  args.output_token_stride = args.output_head_stride = D;
  args.block_table_stride = args.block_table_width = blocks;
  args.num_rows = rows;
  args.num_reqs = args.num_heads = 1;
  args.sliding_window = window;
  args.dtype = args.query_dtype = DType::kFloat32;
  args.scale = 1 / std::sqrt(static_cast<float>(D));
  args.fast = fast;
  args.num_threads = 1;
  const RowRun run{0, 0, rows};
  const RowBlock block{&run, 1, rows, 0};
  StateBuffer total(rows, D), split(rows, D);
  RowState totals = total.neutral(rows), splits = split.neutral(rows);
  attend_rows<D>(args, block, 0, (length + kTileTokens - 1) / kTileTokens, totals,
                 splits);
  merge_rows<D>(rows, totals, splits);
  std::fwrite(totals.max, sizeof(float), rows, stdout);
  std::fwrite(totals.sum, sizeof(float), rows, stdout);
  std::fwrite(totals.acc, sizeof(float), rows * D, stdout);
}

template <int D>
void attend_all(Random& random) {
  const Format formats[] = {
      {8, 8, 0, Quantizer::kSymmetric, Quantizer::kSymmetric, D - 1, D - 1},
      {8, 3, 1, Quantizer::kSymmetric, Quantizer::kCodebook, D - 1, D - 1},
      {7, 4, 1, Quantizer::kSymmetric, Quantizer::kCodebook, D - 1, D - 1},
  };
  for (const Format& format : formats) {
    for (const bool fast : {false, true}) {
      // Both ways to put two terms into tiles, their limits, and several sub-blocks;
      // lengths that end within a subtile, a group of four, a tile and a split.
      for (const int rows : {1, 5, 8, 9, 16, 17, 33, 64}) {
        for (const int length : {64, 77, 170, 700}) {
          attend_case<D>(format, rows, length, -1, fast, random);
          attend_case<D>(format, rows, length, 100, fast, random);
        }
      }
    }
  }
}

}  // namespace

int main() {
  Random random;
  attend_all<64>(random);
  attend_all<128>(random);
  return 0;
}
