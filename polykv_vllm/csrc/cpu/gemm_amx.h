// SPDX-License-Identifier: Apache-2.0
// gemm_scalar.h with AMX int8 tiles (16 x 64 bytes; one instruction = 16 K products).
// The packed keys and the unpacked levels are already in the order of a right operand.
#pragma once

namespace polykv {
namespace {

constexpr int kSubRows = 16;

struct GemmShape {
  int rows;
  int low_row;
  int subtiles;
};

struct alignas(64) TilePalette {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 and 4-7 hold query rows and sums of up to 16 rows; the configuration lives
// as long as one work item, since the kernel of the OS saves it at every switch.
struct TileConfig {
  explicit TileConfig(int) {
    TilePalette palette;
    for (int i = 0; i < 8; ++i) {
      palette.row_bytes[i] = 64;
      palette.rows[i] = 16;
    }
    _tile_loadconfig(&palette);
  }
  ~TileConfig() { _tile_release(); }
};

// One left operand of 16 rows (both terms of up to 8 rows, or one term of more).
// Two sums in flight hide the latency of the product.
template <int D>
inline void qk_pass(const int8_t* query, int subtiles, const uint8_t* const* keys,
                    int32_t* scores, Prefetcher& prefetcher) {
  constexpr int kStride = kTileTokens * 4;
  if constexpr (D == 64) {
    _tile_loadd(4, query, D);
    int s = 0;
    for (; s + 2 <= subtiles; s += 2) {
      prefetcher.step();
      _tile_loadd(6, keys[s], 64);
      _tile_loadd(7, keys[s + 1], 64);
      _tile_zero(0);
      _tile_zero(1);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_stored(0, scores + s * 16, kStride);
      _tile_stored(1, scores + s * 16 + 16, kStride);
    }
    if (s < subtiles) {
      _tile_loadd(6, keys[s], 64);
      _tile_zero(0);
      _tile_dpbsud(0, 4, 6);
      _tile_stored(0, scores + s * 16, kStride);
    }
  } else {
    for (int s = 0; s < subtiles; ++s) {
      prefetcher.step();
      _tile_zero(0);
      for (int c = 0; c < D / 64; c += 2) {
        _tile_loadd(4, query + c * 64, D);
        _tile_loadd(6, keys[s] + c * 1024, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(5, query + c * 64 + 64, D);
        _tile_loadd(7, keys[s] + c * 1024 + 1024, 64);
        _tile_dpbsud(0, 5, 7);
      }
      _tile_stored(0, scores + s * 16, kStride);
    }
  }
}

// Both terms of more than 8 rows share each key tile.
template <int D>
inline void qk_two_terms(const int8_t* query, int subtiles, const uint8_t* const* keys,
                         int32_t* scores, Prefetcher& prefetcher) {
  constexpr int kStride = kTileTokens * 4;
  const int8_t* low = query + 16 * D;
  if constexpr (D <= 128) {
    _tile_loadd(4, query, D);
    _tile_loadd(5, low, D);
    if constexpr (D == 128) {
      _tile_loadd(2, query + 64, D);
      _tile_loadd(3, low + 64, D);
    }
    int s = 0;
    if constexpr (D == 64) {  // four sums in flight
      for (; s + 2 <= subtiles; s += 2) {
        prefetcher.step();
        _tile_loadd(6, keys[s], 64);
        _tile_zero(0);
        _tile_dpbsud(0, 4, 6);
        _tile_zero(1);
        _tile_dpbsud(1, 5, 6);
        _tile_loadd(7, keys[s + 1], 64);
        _tile_zero(2);
        _tile_dpbsud(2, 4, 7);
        _tile_zero(3);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(0, scores + s * 16, kStride);
        _tile_stored(1, scores + 16 * kTileTokens + s * 16, kStride);
        _tile_stored(2, scores + s * 16 + 16, kStride);
        _tile_stored(3, scores + 16 * kTileTokens + s * 16 + 16, kStride);
      }
    }
    for (; s < subtiles; ++s) {
      prefetcher.step();
      _tile_loadd(6, keys[s], 64);
      _tile_zero(0);
      _tile_zero(1);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 5, 6);
      if constexpr (D == 128) {
        _tile_loadd(7, keys[s] + 1024, 64);
        _tile_dpbsud(0, 2, 7);
        _tile_dpbsud(1, 3, 7);
      }
      _tile_stored(0, scores + s * 16, kStride);
      _tile_stored(1, scores + 16 * kTileTokens + s * 16, kStride);
    }
  } else {
    qk_pass<D>(query, subtiles, keys, scores, prefetcher);
    qk_pass<D>(low, subtiles, keys, scores + 16 * kTileTokens, prefetcher);
  }
}

template <int D>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, int32_t* scores,
                    Prefetcher& prefetcher) {
  if (shape.low_row == kSubRows) {
    qk_two_terms<D>(query, shape.subtiles, keys, scores, prefetcher);
  } else {
    qk_pass<D>(query, shape.subtiles, keys, scores, prefetcher);
  }
}

// Sums over 64 tokens at a time; the caller zeroes what lies between the last subtile
// and the next multiple of 64 tokens in `prob`.
template <int D>
inline void pv_pass(const uint8_t* prob, int subtiles, const int8_t* levels,
                    int32_t* acc, Prefetcher& prefetcher) {
  const bool both = subtiles > 4;
  _tile_loadd(4, prob, kTileTokens);
  if (both) _tile_loadd(5, prob + 64, kTileTokens);
  for (int g = 0; g < D / 16; g += 2) {
    prefetcher.step();
    const int8_t* level = levels + g * 64;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(6, level, D * 4);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, level + 64, D * 4);
    _tile_dpbusd(1, 4, 7);
    if (both) {
      _tile_loadd(2, level + 16 * D * 4, D * 4);
      _tile_dpbusd(0, 5, 2);
      _tile_loadd(3, level + 16 * D * 4 + 64, D * 4);
      _tile_dpbusd(1, 5, 3);
    }
    _tile_stored(0, acc + g * 16, D * 4);
    _tile_stored(1, acc + g * 16 + 16, D * 4);
  }
}

// Both terms of more than 8 rows share each tile of levels; four sums in flight.
template <int D>
inline void pv_two_terms(const uint8_t* prob, int subtiles, const int8_t* levels,
                         int32_t* acc, Prefetcher& prefetcher) {
  const uint8_t* low = prob + 16 * kTileTokens;
  for (int g = 0; g < D / 16; g += 2) {
    prefetcher.step();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int chunk = 0; chunk * 4 < subtiles; ++chunk) {
      const int8_t* level = levels + chunk * 16 * D * 4 + g * 64;
      _tile_loadd(4, prob + chunk * 64, kTileTokens);
      _tile_loadd(6, level, D * 4);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(5, low + chunk * 64, kTileTokens);
      _tile_dpbusd(1, 5, 6);
      _tile_loadd(7, level + 64, D * 4);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, acc + g * 16, D * 4);
    _tile_stored(1, acc + 16 * D + g * 16, D * 4);
    _tile_stored(2, acc + g * 16 + 16, D * 4);
    _tile_stored(3, acc + 16 * D + g * 16 + 16, D * 4);
  }
}

template <int D>
inline void gemm_pv(const GemmShape& shape, const uint8_t* prob, const int8_t* levels,
                    int32_t* acc, Prefetcher& prefetcher) {
  if (shape.low_row == kSubRows) {
    pv_two_terms<D>(prob, shape.subtiles, levels, acc, prefetcher);
  } else {
    pv_pass<D>(prob, shape.subtiles, levels, acc, prefetcher);
  }
}

}  // namespace
}  // namespace polykv
