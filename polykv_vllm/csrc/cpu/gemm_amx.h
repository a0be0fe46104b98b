// SPDX-License-Identifier: Apache-2.0
// gemm_scalar.h with AMX int8 tiles (16 x 64 bytes; one instruction = 16 K products).
// The packed keys and the unpacked levels are already in the order of a right operand.
#pragma once

namespace polykv {
namespace {

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
  TileConfig() {
    TilePalette palette;
    for (int i = 0; i < 8; ++i) {
      palette.row_bytes[i] = 64;
      palette.rows[i] = 16;
    }
    _tile_loadconfig(&palette);
  }
  ~TileConfig() { _tile_release(); }
};

// Four sums are in flight everywhere, to hide the latency of the products; the last
// ones of a tile may compute subtiles that do not exist, and leave them unwritten.
constexpr int kScoreStride = kTileTokens * 4;

// One left operand: both terms of up to 8 rows. Four subtiles per pass.
template <int D>
inline void qk_stacked(const int8_t* query, int subtiles, const uint8_t* const* keys,
                       int32_t* scores, Prefetcher& prefetcher) {
  for (int s = 0; s < subtiles; s += 4) {
    prefetcher.step();
    const int last = subtiles - 1;
    const uint8_t* key[4];
    for (int i = 0; i < 4; ++i) key[i] = keys[s + i < last ? s + i : last];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < D / 64; ++c) {
      _tile_loadd(4, query + c * 64, D);
      _tile_loadd(5, key[0] + c * 1024, 64);
      _tile_dpbsud(0, 4, 5);
      _tile_loadd(6, key[1] + c * 1024, 64);
      _tile_dpbsud(1, 4, 6);
      _tile_loadd(7, key[2] + c * 1024, 64);
      _tile_dpbsud(2, 4, 7);
      _tile_loadd(5, key[3] + c * 1024, 64);
      _tile_dpbsud(3, 4, 5);
    }
    int32_t* out = scores + s * 16;
    _tile_stored(0, out, kScoreStride);
    if (s + 1 < subtiles) _tile_stored(1, out + 16, kScoreStride);
    if (s + 2 < subtiles) _tile_stored(2, out + 32, kScoreStride);
    if (s + 3 < subtiles) _tile_stored(3, out + 48, kScoreStride);
  }
}

// Both terms of more than 8 rows share each key tile. Two subtiles per pass.
template <int D>
inline void qk_two_terms(const int8_t* query, int subtiles, const uint8_t* const* keys,
                         int32_t* scores, Prefetcher& prefetcher) {
  const int8_t* low = query + 16 * D;
  int32_t* low_scores = scores + 16 * kTileTokens;
  for (int s = 0; s < subtiles; s += 2) {
    prefetcher.step();
    const bool pair = s + 1 < subtiles;
    const uint8_t *first = keys[s], *second = keys[pair ? s + 1 : s];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < D / 64; ++c) {
      _tile_loadd(4, query + c * 64, D);
      _tile_loadd(6, first + c * 1024, 64);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(5, low + c * 64, D);
      _tile_dpbsud(1, 5, 6);
      _tile_loadd(7, second + c * 1024, 64);
      _tile_dpbsud(2, 4, 7);
      _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, scores + s * 16, kScoreStride);
    _tile_stored(1, low_scores + s * 16, kScoreStride);
    if (!pair) break;
    _tile_stored(2, scores + s * 16 + 16, kScoreStride);
    _tile_stored(3, low_scores + s * 16 + 16, kScoreStride);
  }
}

template <int D>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, int32_t* scores,
                    Prefetcher& prefetcher) {
  if (shape.low_row == kSubRows) {
    qk_two_terms<D>(query, shape.subtiles, keys, scores, prefetcher);
  } else {
    qk_stacked<D>(query, shape.subtiles, keys, scores, prefetcher);
  }
}

// Sums over 64 tokens at a time; the caller zeroes what lies between the last subtile
// and the next multiple of 64 tokens in `prob`. Both terms of up to 8 rows.
template <int D>
inline void pv_stacked(const uint8_t* prob, int subtiles, const int8_t* levels,
                       int32_t* acc, Prefetcher& prefetcher) {
  for (int g = 0; g < D / 16; g += 4) {
    prefetcher.step();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int chunk = 0; chunk * 4 < subtiles; ++chunk) {
      const int8_t* level = levels + chunk * 16 * D * 4 + g * 64;
      _tile_loadd(4, prob + chunk * 64, kTileTokens);
      _tile_loadd(5, level, D * 4);
      _tile_dpbusd(0, 4, 5);
      _tile_loadd(6, level + 64, D * 4);
      _tile_dpbusd(1, 4, 6);
      _tile_loadd(7, level + 128, D * 4);
      _tile_dpbusd(2, 4, 7);
      _tile_loadd(5, level + 192, D * 4);
      _tile_dpbusd(3, 4, 5);
    }
    _tile_stored(0, acc + g * 16, D * 4);
    _tile_stored(1, acc + g * 16 + 16, D * 4);
    _tile_stored(2, acc + g * 16 + 32, D * 4);
    _tile_stored(3, acc + g * 16 + 48, D * 4);
  }
}

// Both terms of more than 8 rows share each tile of levels.
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
    pv_stacked<D>(prob, shape.subtiles, levels, acc, prefetcher);
  }
}

}  // namespace
}  // namespace polykv
