// SPDX-License-Identifier: Apache-2.0
// unpack_scalar.h by registers of kRegBytes bytes, a divisor of 64.
#pragma once

namespace polykv {
namespace {

constexpr bool kUnpacksNarrowChunks = false;  // less than 64 (4-bit planes: 32) dims

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
inline void unpack_3bit(const uint8_t* codes, const uint8_t* high, Reg table,
                        int8_t* levels) {
  for (int quad = 0; quad < 4; ++quad) {
    for_each_3bit_code<D>(codes, high, quad, [&](Reg code, int, int place) {
      store_reg(levels + place, lookup(table, code));
    });
  }
}

template <int D>
inline void unpack_4bit_with_keys(const uint8_t* codes, const uint8_t* high,
                                  const uint8_t* keys, Reg table, int8_t* levels) {
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
inline void unpack_4bit(const uint8_t* codes, Reg table, int8_t* levels) {
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
inline void unpack_2bit(const uint8_t* codes, Reg table, int8_t* levels) {
  const Reg three = set1_byte(3);
  for (int quad = 0; quad < 4; ++quad, codes += D, levels += D * 4) {
    for (int c = 0; c < D / 64; ++c) {
#pragma GCC unroll 4
      for (int byte = 0; byte < 64; byte += kRegBytes) {
        const Reg four = load_reg(codes + c * 64 + byte);
        int8_t* out = levels + c * 256 + byte;
        store_reg(out, lookup(table, and_reg(four, three)));
        store_reg(out + 64, lookup(table, and_reg(srl<2>(four), three)));
        store_reg(out + 128, lookup(table, and_reg(srl<4>(four), three)));
        store_reg(out + 192, lookup(table, and_reg(srl<6>(four), three)));
      }
    }
  }
}

// Key codes of 2 to 4 bits of one subtile -> their levels, a byte each, [D/4][16][4].
template <int D>
inline void unpack_keys(const Format& format, const uint8_t* codes, const uint8_t* high,
                        uint8_t* out) {
  const Reg table = lookup_table(reinterpret_cast<const int8_t*>(key_levels(format)));
  const Reg nibble = set1_byte(15), three = set1_byte(3), four = set1_byte(4);
  const int rows = format.key_bits == 4 ? D / 8 : D / 16;
  for (int c = 0; c < rows; ++c) {
#pragma GCC unroll 4
    for (int byte = 0; byte < 64; byte += kRegBytes) {
      const Reg low = load_reg(codes + c * 64 + byte);
      if (format.key_bits == 4) {
        uint8_t* to = out + c * 128 + byte;
        store_reg(to, lookup(table, and_reg(low, nibble)));
        store_reg(to + 64, lookup(table, and_reg(srl<4>(low), nibble)));
        continue;
      }
      Reg row[4] = {and_reg(low, three), and_reg(srl<2>(low), three),
                    and_reg(srl<4>(low), three), and_reg(srl<6>(low), three)};
      if (format.key_bits == 3) {
        Reg top = load_reg(high + c / 2 * 64 + byte);
        if (c % 2 == 1) top = srl<4>(top);
        row[0] = or_reg(row[0], and_reg(sll<2>(top), four));
        row[1] = or_reg(row[1], and_reg(sll<1>(top), four));
        row[2] = or_reg(row[2], and_reg(top, four));
        row[3] = or_reg(row[3], and_reg(srl<1>(top), four));
      }
      for (int f = 0; f < 4; ++f) {
        store_reg(out + (c * 4 + f) * 64 + byte, lookup(table, row[f]));
      }
    }
  }
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
