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

template <int D>
inline void strip_free_bit(const uint8_t* keys, uint8_t* out) {
  for (int i = 0; i < D * kSubtileTokens; ++i) out[i] = keys[i] & 127;
}

}  // namespace
}  // namespace polykv
