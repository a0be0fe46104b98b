// SPDX-License-Identifier: Apache-2.0
// Value codes of one subtile -> int8 levels, and key bytes without their free bit.
#pragma once

namespace polykv {
namespace {

// `levels` [4 quads][D/16][16 dims][4 tokens]: rows that a dot product over tokens
// takes as they are. `codes`, `high` and `keys` point to the subtile's own bytes.
template <int D>
inline void unpack_values(const Format& format, const uint8_t* codes,
                          const uint8_t* high, const uint8_t* keys, int8_t* levels) {
  const int planes = TileLayout::value_plane_bits(format);
  const int8_t* table = value_levels(format);
  for (int quad = 0; quad < 4; ++quad) {
    for (int d = 0; d < D; ++d) {
      for (int column = 0; column < 4; ++column) {
        int8_t& level = levels[(quad * D + d) * 4 + column];
        if (planes == 8) {
          level = static_cast<int8_t>(codes[(quad * D + d) * 4 + column]);
        } else if (planes == 4) {
          const int byte = (d / 32) * 16 + d % 16;
          const int pair = codes[(quad * D / 2 + byte) * 4 + column];
          level = table[(pair >> (d / 16 % 2 * 4)) & 15];
        } else {
          const int field = d / 16 % 4, half = d / 8 % 2;
          const int low_byte = (d / 64) * 16 + d % 16;
          const int high_byte = (d / 64) * 8 + d % 8;
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

// Key codes of 2 to 4 bits of one subtile -> their levels, a byte each, [D/4][16][4].
template <int D>
inline void unpack_keys(const Format& format, const uint8_t* codes, const uint8_t* high,
                        uint8_t* out) {
  const int low_bits = format.key_bits == 4 ? 4 : 2, fields = 8 / low_bits;
  const uint8_t* table = key_levels(format);
  for (int row = 0; row < D / 4; ++row) {
    for (int i = 0; i < 64; ++i) {
      const int low = codes[row / fields * 64 + i] >> (row % fields * low_bits);
      const int top = format.key_bits == 3 ? high[row / 8 * 64 + i] >> (row % 8) & 1 : 0;
      out[row * 64 + i] = table[(low & ((1 << low_bits) - 1)) | top << 2];
    }
  }
}

template <int D>
inline void strip_free_bit(const uint8_t* keys, uint8_t* out) {
  for (int i = 0; i < D * kSubtileTokens; ++i) out[i] = keys[i] & 127;
}

}  // namespace
}  // namespace polykv
