// SPDX-License-Identifier: Apache-2.0
// Value codes of one subtile -> int8 levels, and key bytes without their free bit.
#pragma once

namespace polykv {
namespace {

template <int D>
inline void unpack_values(const Format& format, const uint8_t* codes,
                          const uint8_t* high, const uint8_t* keys, int8_t* levels) {
  unpack_dims<D>(format, codes, high, keys, levels, 0);
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
