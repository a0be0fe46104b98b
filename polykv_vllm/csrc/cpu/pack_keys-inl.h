// SPDX-License-Identifier: Apache-2.0
// Key codes of 2 to 4 bits -> the planes of formats/layout.py.
#pragma once

namespace polykv {
namespace {

// Four bytes of a token lie 64 bytes after the four before: its subtile's other tokens
// are between.
template <int kBytes>
inline void write_key_plane(uint8_t* plane, int token, const uint8_t* bytes) {
  uint8_t* out = plane + token / kSubtileTokens * kBytes * kSubtileTokens +
                 token % kSubtileTokens * 4;
  for (int i = 0; i < kBytes / 4; ++i) std::memcpy(out + i * 64, bytes + i * 4, 4);
}

template <int D>
inline void pack_key_nibbles(uint8_t* tile, int token, const int8_t* codes) {
  uint8_t bytes[D / 2];
  for (int c = 0; c < D / 8; ++c) {
    const int8_t* code = codes + c * 8;
    for (int j = 0; j < 4; ++j) {
      bytes[c * 4 + j] = static_cast<uint8_t>(code[j] | code[j + 4] << 4);
    }
  }
  write_key_plane<D / 2>(tile, token, bytes);
}

template <int D>
inline void pack_key_pairs(uint8_t* tile, int token, const int8_t* codes) {
  uint8_t bytes[D / 4];
  for (int c = 0; c < D / 16; ++c) {
    const int8_t* code = codes + c * 16;
    for (int j = 0; j < 4; ++j) {
      bytes[c * 4 + j] =
          static_cast<uint8_t>((code[j] & 3) | (code[j + 4] & 3) << 2 |
                               (code[j + 8] & 3) << 4 | (code[j + 12] & 3) << 6);
    }
  }
  write_key_plane<D / 4>(tile, token, bytes);
}

template <int D>
inline void pack_key_tops(uint8_t* plane, int token, const int8_t* codes) {
  uint8_t bytes[D / 8] = {};
  for (int d = 0; d < D; ++d) {
    uint8_t& byte = bytes[d / 32 * 4 + d % 4];
    byte = static_cast<uint8_t>(byte | (codes[d] >> 2 & 1) << d % 32 / 4);
  }
  write_key_plane<D / 8>(plane, token, bytes);
}

template <int D>
inline void pack_low_key(uint8_t* tile, const TileLayout& layout, int bits, int token,
                         const int8_t* codes) {
  if (bits == 4) return pack_key_nibbles<D>(tile, token, codes);
  pack_key_pairs<D>(tile, token, codes);
  if (bits == 3) pack_key_tops<D>(tile + layout.key_high, token, codes);
}

}  // namespace
}  // namespace polykv
