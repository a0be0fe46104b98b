// SPDX-License-Identifier: Apache-2.0
// Finds the bytes of tiles in the cache, and plans to fetch them.
#pragma once

namespace polykv {
namespace {

// Where the tiles of a block of rows lie in the cache.
template <int D>
struct TileReader {
  const Cache& cache;
  const TileLayout& layout;
  const int32_t* table;  // a request's block table; where rows share tiles, any one's
  int64_t head_offset;

  TileReader(const AttentionArgs& args, const TileLayout& layout, const RowBlock& block)
      : cache(args.cache),
        layout(layout),
        table(args.block_table + block.runs[0].request * args.block_table_stride),
        head_offset(block.kv_head * args.cache.head_stride) {}

  // The 16 tokens from position `token` on; they share a block.
  struct Subtile {
    const uint8_t *keys, *key_high, *codes, *high;
    const uint16_t *key_scales, *value_scales, *key_minimums, *value_minimums;
  };

  Subtile subtile(int64_t token) const {
    const int64_t offset = token % cache.block_size;
    const int64_t part = offset / kSubtileTokens;
    const uint8_t* tile =
        cache.data + head_offset + table[token / cache.block_size] * cache.block_stride;
    const auto scalars = [&](int64_t begin) {
      return reinterpret_cast<const uint16_t*>(tile + begin) + offset;
    };
    return {tile + part * key_bytes(),
            tile + layout.key_high + part * D * 2,
            tile + layout.value_codes + part * code_bytes(),
            tile + layout.value_high + part * D * 2,
            scalars(layout.key_scales),
            scalars(layout.value_scales),
            scalars(layout.key_minimums),
            scalars(layout.value_minimums)};
  }

  // Bytes of key codes per subtile; of 3-bit codes, the low plane.
  int64_t key_bytes() const {
    const int plane_bits = TileLayout::key_plane_bits(cache.format);
    return D * 2 * (plane_bits == 3 ? 2 : plane_bits);
  }

  // Bytes of value codes per subtile; of 3-bit codes, the low plane.
  int64_t code_bytes() const {
    const int plane_bits = TileLayout::value_plane_bits(cache.format);
    return D * 2 * (plane_bits == 3 ? 2 : plane_bits);
  }

  // Lines of the subtile, in two to four runs.
  void plan(int64_t token, Prefetcher& prefetcher) const {
    const Subtile next = subtile(token);
    prefetcher.add(next.keys, key_bytes());
    if (cache.format.key_bits == 3) prefetcher.add(next.key_high, D * 2);
    prefetcher.add(next.codes, code_bytes());
    if (TileLayout::value_plane_bits(cache.format) == 3)
      prefetcher.add(next.high, D * 2);
  }
};

// Of affine values, a level counts half steps from the middle of the row's range.
template <typename Subtile>
inline void load_scales(const Format& format, const Subtile& source, int token,
                        TileScales& scales) {
  store(scales.key + token, load_bf16(source.key_scales));
  if (scales.affine_keys) {
    store(scales.key_zero + token, load_bf16(source.key_minimums));
  }
  VecF value = load_bf16(source.value_scales);
  if (scales.affine_values) {
    value = mul(value, set1(0.5f));
    const float levels = static_cast<float>((1 << format.value_bits) - 1);
    const VecF minimum = load_bf16(source.value_minimums);
    store(scales.value_zero + token, fma(value, set1(levels), minimum));
  }
  store(scales.value + token, value);
}

}  // namespace
}  // namespace polykv
