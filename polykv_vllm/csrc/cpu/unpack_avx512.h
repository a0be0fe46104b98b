// SPDX-License-Identifier: Apache-2.0
// unpack_scalar.h on AVX-512: one shuffle looks up 64 levels.
#pragma once

namespace polykv {
namespace {

constexpr bool kUnpacksNarrowChunks = true;

inline __m512i lookup_table(const void* levels) {
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

// The same of a chunk of 32 or 16 dims: its fields are 8 or 4 dims wide, so one vector
// holds two or all four of them. Every lane shifts its field's bits to the bottom; a
// rotation by f + 4h - 2 brings the top bit to bit 2.
template <int kSize>
inline void unpack_3bit_rest(const uint8_t* low_bytes, const uint8_t* high_bytes,
                             __m512i code[kSize / 16]) {
  __m512i low, high;
  if constexpr (kSize == 32) {
    low = _mm512_broadcast_i64x4(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low_bytes)));
    high = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(high_bytes)));
  } else {
    low = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(low_bytes)));
    int64_t word;
    std::memcpy(&word, high_bytes, 8);
    high = _mm512_set1_epi64(word);
  }
  constexpr int kLanes = kSize / 4;  // lanes of 32 bits, one dim each, per field
  const __m512i three = _mm512_set1_epi8(3), seven = _mm512_set1_epi8(7);
  for (int g = 0; g < kSize / 16; ++g) {
    alignas(64) int32_t shift[16], turn[16];
    for (int lane = 0; lane < 16; ++lane) {
      const int dim = g * 16 + lane, field = dim / kLanes;
      shift[lane] = 2 * field;
      turn[lane] = (field + 4 * (dim / (kLanes / 2) % 2) + 30) % 32;
    }
    const __m512i fields = _mm512_srlv_epi32(low, _mm512_load_si512(shift));
    const __m512i top = _mm512_rorv_epi32(high, _mm512_load_si512(turn));
    code[g] =
        _mm512_and_si512(_mm512_ternarylogic_epi32(three, fields, top, 0xca), seven);
  }
}

// Calls fn(chunk's first dim, its size) for what whole chunks of 64 dims leave.
template <int D, typename Fn>
inline void rest_chunks(Fn fn) {
  constexpr int kWhole = D / 64 * 64;
  if constexpr ((D & 32) != 0) fn(kWhole, std::integral_constant<int, 32>{});
  if constexpr ((D & 16) != 0) {
    fn(kWhole + (D & 32), std::integral_constant<int, 16>{});
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
    rest_chunks<D>([&](int dim, auto size) {
      __m512i code[size / 16];
      unpack_3bit_rest<size>(codes + quad * D + dim, high + (quad * D + dim) / 2, code);
      for (int g = 0; g < size / 16; ++g) {
        _mm512_store_si512(levels + (quad * D + dim) * 4 + g * 64,
                           _mm512_shuffle_epi8(table, code[g]));
      }
    });
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

// Levels of 16 dims from `dim` on of the four quads: their top bits are in the keys.
template <int D>
inline void join_free_bits(const uint8_t* keys, int dim, __m512i table,
                           const __m512i code[4], int8_t* levels) {
  __m512i bits[4];
  load_free_bits(keys + dim * 16, bits);
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i top = _mm512_srli_epi32(bits[quad], 4);  // bit 7 to bit 3
    _mm512_store_si512(levels + (quad * D + dim) * 4,
                       _mm512_shuffle_epi8(table, _mm512_or_si512(code[quad], top)));
  }
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
      const __m512i field[4] = {code[0][f], code[1][f], code[2][f], code[3][f]};
      join_free_bits<D>(keys, c * 64 + f * 16, table, field, levels);
    }
  }
  rest_chunks<D>([&](int dim, auto size) {
    __m512i code[4][size / 16];
    for (int quad = 0; quad < 4; ++quad) {
      unpack_3bit_rest<size>(codes + quad * D + dim, high + (quad * D + dim) / 2,
                             code[quad]);
    }
    for (int g = 0; g < size / 16; ++g) {
      const __m512i group[4] = {code[0][g], code[1][g], code[2][g], code[3][g]};
      join_free_bits<D>(keys, dim + g * 16, table, group, levels);
    }
  });
}

template <int D>
inline void unpack_4bit(const uint8_t* codes, __m512i table, int8_t* levels) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int quad = 0; quad < 4; ++quad, codes += D * 2, levels += D * 4) {
    for (int c = 0; c < D / 32; ++c) {
      const __m512i pair = _mm512_loadu_si512(codes + c * 64);
      const __m512i low = _mm512_and_si512(pair, nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi32(pair, 4), nibble);
      _mm512_store_si512(levels + c * 128, _mm512_shuffle_epi8(table, low));
      _mm512_store_si512(levels + c * 128 + 64, _mm512_shuffle_epi8(table, high));
    }
    if constexpr ((D & 16) != 0) {  // 8 dims in the low nibbles, 8 in the high ones
      const __m256i pair =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + (D - 16) * 2));
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(pair),
                                              _mm256_srli_epi32(pair, 4), 1);
      _mm512_store_si512(levels + (D - 16) * 4,
                         _mm512_shuffle_epi8(table, _mm512_and_si512(both, nibble)));
    }
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

// Key codes of 2 to 4 bits of one subtile -> their levels, a byte each, [D/4][16][4].
template <int D>
inline void unpack_keys(const Format& format, const uint8_t* codes, const uint8_t* high,
                        uint8_t* out) {
  const __m512i table = lookup_table(key_levels(format));
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
