// SPDX-License-Identifier: Apache-2.0
// unpack_scalar.h by registers of kRegBytes bytes, a divisor of 64.
#pragma once

namespace polykv {
namespace {

inline Reg level_table(const int8_t (&levels)[8]) {
  int8_t twice[16];
  std::memcpy(twice, levels, 8);
  std::memcpy(twice + 8, levels, 8);
  return lookup_table(twice);
}
inline Reg level_table(const int8_t (&levels)[16]) { return lookup_table(levels); }

// Codes 0..7 of four tokens, for the dims of register `part` of each field of 16 dims:
// bits 2f and 2f + 1 of the low plane, and bit f of the high one, or f + 4 for dims
// 8..15. The shifts are of words: what they bring over from a neighbour is masked.
inline void unpack_3bit_codes(const uint8_t* low_bytes, const uint8_t* high_bytes,
                              int part, Reg code[4]) {
  const Reg low = load_reg(low_bytes + part * kRegBytes);
  Reg high = load_reg(high_bytes + part * kRegBytes % 32);
  if (part * kRegBytes >= 32) high = srl<4>(high);
  const Reg three = set1_byte(3), four = set1_byte(4);
  const auto join = [&](Reg field, Reg top) {
    return or_reg(and_reg(field, three), and_reg(top, four));
  };
  code[0] = join(low, sll<2>(high));
  code[1] = join(srl<2>(low), sll<1>(high));
  code[2] = join(srl<4>(low), high);
  code[3] = join(srl<6>(low), srl<1>(high));
}

// fn(code, dim, place): the codes of four tokens from `dim` on, and where they belong.
template <int D, typename Fn>
inline void for_each_3bit_code(const uint8_t* codes, const uint8_t* high, int quad,
                               Fn fn) {
  for (int c = 0; c < D / 64; ++c) {
#pragma GCC unroll 4
    for (int part = 0; part < 64 / kRegBytes; ++part) {
      Reg code[4];
      unpack_3bit_codes(codes + quad * D + c * 64, high + quad * D / 2 + c * 32, part,
                        code);
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f) {
        const int place = (c * 4 + f) * 64 + part * kRegBytes;
        fn(code[f], place / 4, quad * D * 4 + place);
      }
    }
  }
}

template <int D>
inline void unpack_3bit(const uint8_t* codes, const uint8_t* high, int8_t* levels) {
  const Reg table = level_table(Codebook<3>::kLevels);
  for (int quad = 0; quad < 4; ++quad) {
    for_each_3bit_code<D>(codes, high, quad, [&](Reg code, int, int place) {
      store_reg(levels + place, lookup(table, code));
    });
  }
}

template <int D>
inline void unpack_4bit_with_keys(const uint8_t* codes, const uint8_t* high,
                                  const uint8_t* keys, int8_t* levels) {
  const Reg table = level_table(Codebook<4>::kLevels);
  const Reg eight = set1_byte(8);
  for (int quad = 0; quad < 4; ++quad) {
    for_each_3bit_code<D>(codes, high, quad, [&](Reg code, int dim, int place) {
      const Reg free_bits = load_quad_keys(keys + dim / 4 * 64 + quad * 16);
      const Reg top = and_reg(srl<4>(free_bits), eight);  // bit 7 to bit 3
      store_reg(levels + place, lookup(table, or_reg(code, top)));
    });
  }
}

template <int D>
inline void unpack_4bit(const uint8_t* codes, int8_t* levels) {
  const Reg table = level_table(Codebook<4>::kLevels);
  const Reg nibble = set1_byte(15);
  for (int quad = 0; quad < 4; ++quad, codes += D * 2, levels += D * 4) {
    for (int c = 0; c < D / 32; ++c) {
#pragma GCC unroll 4
      for (int byte = 0; byte < 64; byte += kRegBytes) {
        const Reg pair = load_reg(codes + c * 64 + byte);
        int8_t* out = levels + c * 128 + byte;
        store_reg(out, lookup(table, and_reg(pair, nibble)));
        store_reg(out + 64, lookup(table, and_reg(srl<4>(pair), nibble)));
      }
    }
  }
}

template <int D>
inline void unpack_values(const Format& format, const uint8_t* codes,
                          const uint8_t* high, const uint8_t* keys, int8_t* levels) {
  if (format.value_bits == 3) {
    unpack_3bit<D>(codes, high, levels);
  } else if (format.key_bits == 7) {
    unpack_4bit_with_keys<D>(codes, high, keys, levels);
  } else if (format.value_bits == 4) {
    unpack_4bit<D>(codes, levels);
  } else {
    std::memcpy(levels, codes, D * kSubtileTokens);
    return;
  }
  // The narrower chunks that head dims of no whole ones end with.
  const int planes = TileLayout::value_plane_bits(format);
  const int whole = planes == 3 ? D / 64 * 64 : D / 32 * 32;
  if (whole < D) unpack_dims<D>(format, codes, high, keys, levels, whole);
}

template <int D>
inline void strip_free_bit(const uint8_t* keys, uint8_t* out) {
  const Reg mask = set1_byte(127);
  for (int i = 0; i < D * kSubtileTokens; i += kRegBytes) {
    store_reg(out + i, and_reg(load_reg(keys + i), mask));
  }
}

}  // namespace
}  // namespace polykv
