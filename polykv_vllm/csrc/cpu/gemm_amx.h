// SPDX-License-Identifier: Apache-2.0
// gemm_scalar.h with AMX int8 tiles (16 x 64 bytes; one instruction = 16 K products).
// The packed keys and the unpacked levels are already in the order of a right operand.
#pragma once

namespace polykv {
namespace {

constexpr int kHeadDimStep = 64;  // whole tiles only; gemm_dot.h does the others

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

inline void store_prob(uint8_t* high, uint8_t* low, const VecF x[4], VecF unit) {
  store_u16_split(high, low, x, unit);
}

// Four sums are in flight everywhere, to hide the latency of the products. Tiles leave
// through memory: the vectors of one step are read after the products of the next were
// begun and before their tiles are stored, so that both fit the window of the core.
class TileStage {
 public:
  template <typename Drain>
  void store(Drain drain) {
    if (step_ > 0) drain(tiles_[~step_ & 1]);
    auto& tiles = tiles_[step_++ & 1];
    _tile_stored(0, tiles[0], 64);
    _tile_stored(1, tiles[1], 64);
    _tile_stored(2, tiles[2], 64);
    _tile_stored(3, tiles[3], 64);
  }
  template <typename Drain>
  void finish(Drain drain) {
    drain(tiles_[~step_ & 1]);
  }

 private:
  alignas(64) int32_t tiles_[2][4][256];
  int step_ = 0;
};

// One left operand: both terms of up to 8 rows. Four subtiles per step; the last ones
// may be none, and are computed from the last one's keys and left alone.
template <int D, typename Sink>
inline void qk_stacked(const GemmShape& shape, const int8_t* query,
                       const uint8_t* const* keys, Prefetcher& prefetcher, Sink sink) {
  TileStage stage;
  int drained = 0;
  const auto drain = [&](int32_t (*tiles)[256]) {
    for (int i = 0; i < 4 && drained < shape.subtiles; ++i, ++drained) {
      for (int r = 0; r < shape.rows; ++r) {
        sink(r, drained * 16, load_i(tiles[i] + r * 16),
             load_i(tiles[i] + (r + shape.low_row) * 16));
      }
    }
  };
  for (int s = 0; s < shape.subtiles; s += 4) {
    prefetcher.step();
    const int last = shape.subtiles - 1;
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
    stage.store(drain);
  }
  stage.finish(drain);
}

// Both terms of more than 8 rows share each key tile. Two subtiles per step.
template <int D, typename Sink>
inline void qk_two_terms(const GemmShape& shape, const int8_t* query,
                         const uint8_t* const* keys, Prefetcher& prefetcher,
                         Sink sink) {
  const int8_t* low = query + 16 * D;
  TileStage stage;
  int drained = 0;
  const auto drain = [&](int32_t (*tiles)[256]) {
    for (int i = 0; i < 4 && drained < shape.subtiles; i += 2, ++drained) {
      for (int r = 0; r < shape.rows; ++r) {
        sink(r, drained * 16, load_i(tiles[i] + r * 16), load_i(tiles[i + 1] + r * 16));
      }
    }
  };
  for (int s = 0; s < shape.subtiles; s += 2) {
    prefetcher.step();
    const uint8_t *first = keys[s], *second = keys[s + 1 < shape.subtiles ? s + 1 : s];
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
    stage.store(drain);
  }
  stage.finish(drain);
}

template <int D, typename Sink>
inline void gemm_qk(const GemmShape& shape, const int8_t* query,
                    const uint8_t* const* keys, Prefetcher& prefetcher, Sink sink) {
  if (shape.low_row == kSubRows) {
    qk_two_terms<D>(shape, query, keys, prefetcher, sink);
  } else {
    qk_stacked<D>(shape, query, keys, prefetcher, sink);
  }
}

// Sums over 64 tokens at a time; the caller zeroes what lies between the last subtile
// and the next multiple of 64 tokens in `prob`. One left operand: both terms of up to 8
// rows, or one term of up to 16.
template <int D, int kTerms, typename Sink>
inline void pv_one_operand(const GemmShape& shape, const uint8_t* prob,
                           const int8_t* levels, Prefetcher& prefetcher, Sink sink) {
  TileStage stage;
  int dim = 0;
  const auto drain = [&](int32_t (*tiles)[256]) {
    for (int i = 0; i < 4; ++i, dim += 16) {
      for (int r = 0; r < shape.rows; ++r) {
        sink(r, dim, load_i(tiles[i] + r * 16),
             kTerms == 2 ? load_i(tiles[i] + (r + shape.low_row) * 16) : set1_i(0));
      }
    }
  };
  for (int g = 0; g < D / 16; g += 4) {
    prefetcher.step();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int chunk = 0; chunk * 4 < shape.subtiles; ++chunk) {
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
    stage.store(drain);
  }
  stage.finish(drain);
}

// Both terms of more than 8 rows share each tile of levels.
template <int D, typename Sink>
inline void pv_two_terms(const GemmShape& shape, const uint8_t* prob,
                         const int8_t* levels, Prefetcher& prefetcher, Sink sink) {
  const uint8_t* low = prob + 16 * kTileTokens;
  TileStage stage;
  int dim = 0;
  const auto drain = [&](int32_t (*tiles)[256]) {
    for (int i = 0; i < 4; i += 2, dim += 16) {
      for (int r = 0; r < shape.rows; ++r) {
        sink(r, dim, load_i(tiles[i] + r * 16), load_i(tiles[i + 1] + r * 16));
      }
    }
  };
  for (int g = 0; g < D / 16; g += 2) {
    prefetcher.step();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int chunk = 0; chunk * 4 < shape.subtiles; ++chunk) {
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
    stage.store(drain);
  }
  stage.finish(drain);
}

template <int D, int kTerms, typename Sink>
inline void gemm_pv(const GemmShape& shape, const uint8_t* prob, const int8_t* levels,
                    Prefetcher& prefetcher, Sink sink) {
  if (kTerms == 2 && shape.low_row == kSubRows) {
    pv_two_terms<D>(shape, prob, levels, prefetcher, sink);
  } else {
    pv_one_operand<D, kTerms>(shape, prob, levels, prefetcher, sink);
  }
}

}  // namespace
}  // namespace polykv
