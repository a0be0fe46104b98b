// SPDX-License-Identifier: Apache-2.0
// Value codes of one subtile -> int8 levels, one by one.
#pragma once

namespace polykv {
namespace {

// `levels` [4 quads][D/16][16 dims][4 tokens]: rows that a dot product over tokens takes
// as they are. `codes`, `high` and `keys` point to the subtile's own bytes; dims below
// `begin` are left alone.
template <int D>
inline void unpack_dims(const Format& format, const uint8_t* codes,
                        const uint8_t* high, const uint8_t* keys, int8_t* levels,
                        int begin) {
  const int planes = TileLayout::value_plane_bits(format);
  const int8_t* table = value_levels(format);
  for (int quad = 0; quad < 4; ++quad) {
    for (int d = begin; d < D; ++d) {
      for (int column = 0; column < 4; ++column) {
        int8_t& level = levels[(quad * D + d) * 4 + column];
        if (planes == 8) {
          level = static_cast<int8_t>(codes[(quad * D + d) * 4 + column]);
        } else if (planes == 4) {
          const Chunk chunk = chunk_of(D, d, 32);
          const int half = chunk.size / 2, i = d - chunk.begin;
          const int byte = chunk.begin / 2 + i % half;
          const int pair = codes[(quad * D / 2 + byte) * 4 + column];
          level = table[(pair >> (i / half * 4)) & 15];
        } else {
          const Chunk chunk = chunk_of(D, d, 64);
          const int rows = chunk.size / 4, i = d - chunk.begin;
          const int field = i / rows, half = i / (rows / 2) % 2;
          const int low_byte = chunk.begin / 4 + i % rows;
          const int high_byte = chunk.begin / 8 + i % (rows / 2);
          const int low =
              codes[(quad * D / 4 + low_byte) * 4 + column] >> (2 * field) & 3;
          if (planes == 2) {
            level = table[low];
            continue;
          }
          const int top =
              high[(quad * D / 8 + high_byte) * 4 + column] >> (field + 4 * half) & 1;
          const int code = low | top << 2;
          if (format.value_bits == 3) {
            level = table[code];
          } else {
            const int free_bit =
                keys[(d / 4) * 64 + (quad * 4 + column) * 4 + d % 4] >> 7;
            level = table[code | free_bit << 3];
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace polykv
