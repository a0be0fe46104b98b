// SPDX-License-Identifier: Apache-2.0
// unpack_scalar.h on AVX-512: one shuffle looks up 64 levels.
#pragma once

namespace polykv {
namespace {

inline __m512i level_table(const void* levels) {
  return _mm512_broadcast_i32x4(
      _mm_loadu_si128(static_cast<const __m128i*>(levels)));
}

// Codes 0..7 of dims 64c+16f+i, four tokens each, for f = 0..3:
// (low >> 2f) & 3 | top << 2, where `top` was brought to bit f of its lane.
inline void unpack_3bit_codes(const uint8_t* low_bytes, const uint8_t* high_bytes,
                              __m512i code[4]) {
  const __m512i low = _mm512_loadu_si512(low_bytes);
  const __m512i both = _mm512_broadcast_i64x4(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high_bytes)));
  // Dims 8..15 of a field use bits 4..7: the upper eight lanes shift down by four.
  const __m512i lanes =
      _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
  const __m512i high = _mm512_srlv_epi32(both, lanes);
  const __m512i three = _mm512_set1_epi8(3), seven = _mm512_set1_epi8(7);
  const __m512i shifted[4] = {_mm512_slli_epi32(high, 2), _mm512_slli_epi32(high, 1),
                              high, _mm512_srli_epi32(high, 1)};
  const __m512i fields[4] = {low, _mm512_srli_epi32(low, 2), _mm512_srli_epi32(low, 4),
                             _mm512_srli_epi32(low, 6)};
  for (int f = 0; f < 4; ++f) {
    // 0xca selects: mask ? field : shifted.
    const __m512i merged =
        _mm512_ternarylogic_epi32(three, fields[f], shifted[f], 0xca);
    code[f] = _mm512_and_si512(merged, seven);
  }
}

template <int D>
inline void unpack_3bit(const uint8_t* codes, const uint8_t* high, __m512i table,
                        int8_t* levels) {
  for (int quad = 0; quad < 4; ++quad) {
    for (int c = 0; c < D / 64; ++c) {
      __m512i code[4];
      unpack_3bit_codes(codes + quad * D + c * 64, high + quad * D / 2 + c * 32, code);
      for (int f = 0; f < 4; ++f) {
        _mm512_store_si512(levels + quad * D * 4 + (c * 4 + f) * 64,
                           _mm512_shuffle_epi8(table, code[f]));
      }
    }
  }
}

// Free bits of 16 dims (four key rows) for the four quads: bytes [dim][token] per quad.
inline void load_free_bits(const uint8_t* keys, __m512i bits[4]) {
  const __m512i bit = _mm512_set1_epi8(static_cast<char>(128));
  __m512i row[4];
  for (int r = 0; r < 4; ++r) {
    row[r] = _mm512_and_si512(_mm512_loadu_si512(keys + r * 64), bit);
  }
  // Lane q of row r holds [token of quad q][dim of row r]: transpose lanes, then bytes.
  const __m512i a = _mm512_shuffle_i32x4(row[0], row[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(row[2], row[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(row[0], row[1], 0xee);
  const __m512i d = _mm512_shuffle_i32x4(row[2], row[3], 0xee);
  const __m512i bytes = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  bits[0] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(a, b, 0x88), bytes);
  bits[1] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(a, b, 0xdd), bytes);
  bits[2] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(c, d, 0x88), bytes);
  bits[3] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(c, d, 0xdd), bytes);
}

template <int D>
inline void unpack_4bit_with_keys(const uint8_t* codes, const uint8_t* high,
                                  const uint8_t* keys, __m512i table,
                                  int8_t* levels) {
  for (int c = 0; c < D / 64; ++c) {
    __m512i code[4][4];
    for (int quad = 0; quad < 4; ++quad) {
      unpack_3bit_codes(codes + quad * D + c * 64, high + quad * D / 2 + c * 32,
                        code[quad]);
    }
    for (int f = 0; f < 4; ++f) {
      __m512i bits[4];
      load_free_bits(keys + (c * 16 + f * 4) * 64, bits);
      for (int quad = 0; quad < 4; ++quad) {
        const __m512i top = _mm512_srli_epi32(bits[quad], 4);  // bit 7 to bit 3
        const __m512i index = _mm512_or_si512(code[quad][f], top);
        _mm512_store_si512(levels + quad * D * 4 + (c * 4 + f) * 64,
                           _mm512_shuffle_epi8(table, index));
      }
    }
  }
}

template <int D>
inline void unpack_4bit(const uint8_t* codes, __m512i table, int8_t* levels) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int i = 0; i < 4 * (D / 32); ++i) {
    const __m512i pair = _mm512_loadu_si512(codes + i * 64);
    const __m512i low = _mm512_and_si512(pair, nibble);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi32(pair, 4), nibble);
    _mm512_store_si512(levels + i * 128, _mm512_shuffle_epi8(table, low));
    _mm512_store_si512(levels + i * 128 + 64, _mm512_shuffle_epi8(table, high));
  }
}

template <int D>
inline void unpack_2bit(const uint8_t* codes, __m512i table, int8_t* levels) {
  const __m512i three = _mm512_set1_epi8(3);
  for (int i = 0; i < 4 * (D / 64); ++i) {
    const __m512i four = _mm512_loadu_si512(codes + i * 64);
    const __m512i fields[4] = {four, _mm512_srli_epi32(four, 2),
                               _mm512_srli_epi32(four, 4), _mm512_srli_epi32(four, 6)};
    for (int f = 0; f < 4; ++f) {
      const __m512i code = _mm512_and_si512(fields[f], three);
      _mm512_store_si512(levels + (i * 4 + f) * 64, _mm512_shuffle_epi8(table, code));
    }
  }
}

template <int D>
inline void unpack_values(const Format& format, const uint8_t* codes,
                          const uint8_t* high, const uint8_t* keys, int8_t* levels) {
  const __m512i table = level_table(value_levels(format));
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
  }
}

// Key codes of 2 to 4 bits of one subtile -> their levels, a byte each, [D/4][16][4].
template <int D>
inline void unpack_keys(const Format& format, const uint8_t* codes, const uint8_t* high,
                        uint8_t* out) {
  const __m512i table = level_table(key_levels(format));
  const auto put = [&](int row, __m512i code) {
    _mm512_store_si512(out + row * 64, _mm512_shuffle_epi8(table, code));
  };
  if (format.key_bits == 4) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int c = 0; c < D / 8; ++c) {
      const __m512i pair = _mm512_loadu_si512(codes + c * 64);
      put(c * 2, _mm512_and_si512(pair, nibble));
      put(c * 2 + 1, _mm512_and_si512(_mm512_srli_epi32(pair, 4), nibble));
    }
    return;
  }
  const __m512i three = _mm512_set1_epi8(3), four = _mm512_set1_epi8(4);
  for (int c = 0; c < D / 16; ++c) {
    const __m512i low = _mm512_loadu_si512(codes + c * 64);
    __m512i row[4] = {low, _mm512_srli_epi32(low, 2), _mm512_srli_epi32(low, 4),
                      _mm512_srli_epi32(low, 6)};
    for (int f = 0; f < 4; ++f) row[f] = _mm512_and_si512(row[f], three);
    if (format.key_bits == 3) {
      __m512i top = _mm512_loadu_si512(high + c / 2 * 64);
      if (c % 2 == 1) top = _mm512_srli_epi32(top, 4);
      const __m512i bits[4] = {_mm512_slli_epi32(top, 2), _mm512_slli_epi32(top, 1),
                               top, _mm512_srli_epi32(top, 1)};
      for (int f = 0; f < 4; ++f) {
        row[f] = _mm512_or_si512(row[f], _mm512_and_si512(bits[f], four));
      }
    }
    for (int f = 0; f < 4; ++f) put(c * 4 + f, row[f]);
  }
}

template <int D>
inline void strip_free_bit(const uint8_t* keys, uint8_t* out) {
  const __m512i mask = _mm512_set1_epi8(127);
  for (int i = 0; i < D * kSubtileTokens; i += 64) {
    _mm512_store_si512(out + i, _mm512_and_si512(_mm512_loadu_si512(keys + i), mask));
  }
}

}  // namespace
}  // namespace polykv
