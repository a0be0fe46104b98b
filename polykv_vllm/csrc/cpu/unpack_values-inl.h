// SPDX-License-Identifier: Apache-2.0
// Value codes of one subtile -> int8 levels, by the functions of the file before this
// one: unpack_avx512.h or unpack_bytes.h.
#pragma once

namespace polykv {
namespace {

template <int D>
inline void unpack_values(const Format& format, const uint8_t* codes,
                          const uint8_t* high, const uint8_t* keys, int8_t* levels) {
  const auto table = lookup_table(value_levels(format));
  if (format.value_bits == 3) {
    unpack_3bit<D>(codes, high, table, levels);
  } else if (format.key_bits == 7) {
    unpack_4bit_with_keys<D>(codes, high, keys, table, levels);
  } else if (format.value_bits == 4) {
    unpack_4bit<D>(codes, table, levels);
  } else if (format.value_bits == 2) {
    unpack_2bit<D>(codes, table, levels);
  } else {
    std::memcpy(levels, codes, D * kSubtileTokens);
    return;
  }
  if constexpr (!kUnpacksNarrowChunks) {
    const int planes = TileLayout::value_plane_bits(format);
    const int whole = planes < 4 ? D / 64 * 64 : D / 32 * 32;
    if (whole < D) unpack_dims<D>(format, codes, high, keys, levels, whole);
  }
}

}  // namespace
}  // namespace polykv
