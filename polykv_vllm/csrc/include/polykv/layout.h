// SPDX-License-Identifier: Apache-2.0
// Byte offsets in a tile. The drawing is in formats/layout.py; a test compares the two.
#pragma once

#include <cstdint>

#include "polykv/args.h"

namespace polykv {

// Head dimensions that the kernels are built for, multiples of 16
// (formats/registry.py).
constexpr int kHeadDims[] = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512};
constexpr int kNumHeadDims = sizeof(kHeadDims) / sizeof(kHeadDims[0]);

// Codes of values lie in chunks of dims: as many of 64 (3-bit planes) or 32 (4-bit
// planes) as there are, then one of 32 and one of 16 where D leaves them.
struct Chunk {
  int begin, size;  // dims
};
constexpr Chunk chunk_of(int head_dim, int dim, int whole) {
  Chunk chunk{dim / whole * whole, whole};
  while (chunk.begin + chunk.size > head_dim || dim >= chunk.begin + chunk.size) {
    if (chunk.begin + chunk.size <= head_dim) chunk.begin += chunk.size;
    chunk.size /= 2;
  }
  return chunk;
}

constexpr int kSubtileTokens = 16;  // tokens beside each other in the key codes
constexpr int kQuadTokens = 4;      // tokens beside each other in the value codes

struct TileLayout {
  int64_t key_high;     // high plane of 3-bit key codes; key codes start at 0
  int64_t value_codes;
  int64_t value_high;   // high plane of 3-bit codes
  int64_t key_scales;
  int64_t value_scales;
  int64_t key_minimums;  // of affine rows
  int64_t value_minimums;
  int64_t tile_bytes;

  TileLayout(const Format& format, int64_t head_dim, int64_t block_size) {
    const int64_t elements = block_size * head_dim, scalars = 2 * block_size;
    key_high = elements / 4;
    value_codes = elements * key_plane_bits(format) / 8;
    value_high = value_codes + elements / 4;
    key_scales = value_codes + elements * value_plane_bits(format) / 8;
    value_scales = key_scales + scalars;
    key_minimums = value_scales + scalars;
    value_minimums = key_minimums;
    if (format.key_quantizer == Quantizer::kAffine) value_minimums += scalars;
    tile_bytes = value_minimums;
    if (format.value_quantizer == Quantizer::kAffine) tile_bytes += scalars;
  }

  static int key_plane_bits(const Format& format) {
    return format.key_bits < 7 ? format.key_bits : 8;
  }
  static int value_plane_bits(const Format& format) {
    return format.value_bits - (key_plane_bits(format) - format.key_bits);
  }
};

}  // namespace polykv
