// SPDX-License-Identifier: Apache-2.0
// The AMX instructions that gemm_amx.h uses, in plain C++ under the same names: what
// they do to memory and to the eight tiles, and what would be a fault on hardware.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tiles {

struct Tile {
  int rows, row_bytes;
  uint8_t data[16][64];
};

struct State {
  bool configured = false;
  Tile tile[8];
};
inline State state;

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "a fault on hardware: %s\n", what);
  std::abort();
}

inline Tile& tile(int number) {
  require(state.configured, "a tile is used without a configuration");
  require(number >= 0 && number < 8, "there are eight tiles");
  return state.tile[number];
}

// Four products for each sum of 32 bits: no saturation, sums wrap.
template <typename A, typename B>
void multiply(int sums, int left, int right) {
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  require(sums != left && sums != right && left != right, "an operand is used twice");
  require(a.rows == c.rows && b.row_bytes == c.row_bytes && a.row_bytes == 4 * b.rows,
          "shapes do not fit");
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      uint32_t sum;
      std::memcpy(&sum, c.data[m] + 4 * n, 4);
      for (int k = 0; k < a.row_bytes; ++k) {
        A x;
        B y;
        std::memcpy(&x, a.data[m] + k, 1);
        std::memcpy(&y, b.data[k / 4] + 4 * n + k % 4, 1);
        sum += static_cast<uint32_t>(int32_t{x} * int32_t{y});
      }
      std::memcpy(c.data[m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace tiles

// 64 bytes: palette, start row, 14 reserved, 16 row sizes of 16 bits, 16 row counts.
inline void _tile_loadconfig(const void* memory) {
  const auto* bytes = static_cast<const uint8_t*>(memory);
  tiles::require(bytes[0] == 1, "the palette is not 1");
  for (int i = 1; i < 16; ++i) tiles::require(bytes[i] == 0, "reserved bytes are set");
  for (int i = 0; i < 8; ++i) {
    tiles::Tile& tile = tiles::state.tile[i];
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    tile.row_bytes = row_bytes;
    tile.rows = bytes[48 + i];
    tiles::require(tile.rows <= 16 && tile.row_bytes <= 64, "a tile is too large");
    std::memset(tile.data, 0, sizeof(tile.data));
  }
  tiles::state.configured = true;
}

inline void _tile_release() {
  tiles::require(tiles::state.configured, "released without a configuration");
  // What is read from a tile after this was never meant to be.
  std::memset(tiles::state.tile, 0xa5, sizeof(tiles::state.tile));
  tiles::state.configured = false;
}

inline void _tile_zero(int number) {
  tiles::Tile& tile = tiles::tile(number);
  std::memset(tile.data, 0, sizeof(tile.data));
}

inline void _tile_loadd(int number, const void* base, int64_t stride) {
  tiles::Tile& tile = tiles::tile(number);
  std::memset(tile.data, 0, sizeof(tile.data));
  for (int r = 0; r < tile.rows; ++r) {
    std::memcpy(tile.data[r], static_cast<const uint8_t*>(base) + r * stride,
                tile.row_bytes);
  }
}

inline void _tile_stored(int number, void* base, int64_t stride) {
  const tiles::Tile& tile = tiles::tile(number);
  for (int r = 0; r < tile.rows; ++r) {
    std::memcpy(static_cast<uint8_t*>(base) + r * stride, tile.data[r], tile.row_bytes);
  }
}

inline void _tile_dpbsud(int sums, int left, int right) {
  tiles::multiply<int8_t, uint8_t>(sums, left, right);
}

inline void _tile_dpbusd(int sums, int left, int right) {
  tiles::multiply<uint8_t, int8_t>(sums, left, right);
}
