// SPDX-License-Identifier: Apache-2.0
// Quantize, pack and scatter: reference/quantize.py step by step, same rounding.
#pragma once

namespace polykv {
namespace {

constexpr int32_t kNonFinite = 0x7f800000;

// Symmetric codes with a bf16 scale rounded upwards, so that no code overflows.
template <int D>
inline uint16_t quantize_symmetric(const float* x, int32_t max_bits, int max_code,
                                   int8_t* codes) {
  const uint16_t scale =
      bf16_round_up(float_of(max_bits) / static_cast<float>(max_code));
  if (scale == 0) {
    std::memset(codes, 0, D);
    return 0;
  }
  const VecF divisor = set1(bf16_value(scale));
  const VecF top = set1(static_cast<float>(max_code));
  const VecF bottom = set1(static_cast<float>(-max_code));
  for (int i = 0; i < D; i += 16) {
    const VecF q = div(load(x + i), divisor);
    store_i8(codes + i, to_int(min(top, max(bottom, q))));
  }
  return scale;
}

template <int kBits>
constexpr int32_t squared_level(int code) {
  return Codebook<kBits>::kLevels[code] * Codebook<kBits>::kLevels[code];
}

// Lloyd-Max codes of the row, rotated first if asked (x is overwritten). The scale
// makes the norm of the dequantized row equal the row's own; the codes come from the
// unrounded RMS.
template <int D, int kBits>
inline uint16_t quantize_codebook(float* x, int32_t max_bits, bool rotate,
                                  int8_t* codes) {
  const int32_t exponent = max_bits >> 23;
  if (exponent <= 1) {  // below 2^-125: no scale could hold it
    std::memset(codes, 0, D);
    return 0;
  }
  // An exact power of two brings the row to [2, 4), so squares stay in range.
  const VecF power = set1(float_of((255 - exponent) << 23));
  for (int i = 0; i < D; i += 16) store(x + i, mul(load(x + i), power));
  if (rotate) rotate_unnormalized<D>(x);
  const float norm2 = reduce_add(sum_squares<D>(x));
  const float rms = std::sqrt(norm2 / static_cast<float>(D));
  VecI level_norm2 = set1_i(0);
  for (int i = 0; i < D; i += 16) {
    const VecF y = load(x + i);
    VecI code = set1_i(0), squared = set1_i(squared_level<kBits>(0));
    for (int j = 0; j < (1 << kBits) - 1; ++j) {
      const Mask above = greater(y, set1(boundary<kBits>(j) * rms));
      const int32_t step = squared_level<kBits>(j + 1) - squared_level<kBits>(j);
      code = add_where(above, code, set1_i(1));
      squared = add_where(above, squared, set1_i(step));
    }
    store_i8(codes + i, code);
    level_norm2 = add_i(level_norm2, squared);
  }
  // Exact: squares of levels sum to less than 2^24 for D = 512, and widest is a power.
  const int gain = rotate ? widest_block(D) : 1;
  const float coded = static_cast<float>(reduce_add_i(level_norm2)) * gain;
  const float ratio = norm2 / coded;
  return bf16_round(std::sqrt(ratio) * float_of((exponent - 1) << 23));
}

// A token's bytes are first made side by side, in loops that compilers vectorize, and
// then written to their places.
template <int D>
inline void pack_key(uint8_t* tile, int token, const int8_t* codes, int bias,
                     const int8_t* top_bits) {
  uint8_t bytes[D];
  for (int d = 0; d < D; ++d) bytes[d] = static_cast<uint8_t>(codes[d] + bias);
  if (top_bits) {
    for (int d = 0; d < D; ++d) {
      bytes[d] = static_cast<uint8_t>(bytes[d] | (top_bits[d] >> 3) << 7);
    }
  }
  uint8_t* out = tile + (token / kSubtileTokens) * kSubtileTokens * D +
                 (token % kSubtileTokens) * 4;
  for (int g = 0; g < D / 4; ++g) std::memcpy(out + g * 64, bytes + g * 4, 4);
}

// Byte i of a token lies four bytes after byte i - 1: its quad's tokens are between.
template <int kBytes>
inline void write_plane(uint8_t* plane, int token, const uint8_t* bytes) {
  uint8_t* out =
      plane + token / kQuadTokens * kBytes * kQuadTokens + token % kQuadTokens;
  for (int i = 0; i < kBytes; ++i) out[i * kQuadTokens] = bytes[i];
}

template <int kSize>
inline void pack_3bit_chunk(const int8_t* c, uint8_t* low, uint8_t* high) {
  constexpr int R = kSize / 4;  // dims of a field
  for (int i = 0; i < R; ++i) {
    low[i] = static_cast<uint8_t>((c[i] & 3) | (c[i + R] & 3) << 2 |
                                  (c[i + 2 * R] & 3) << 4 | (c[i + 3 * R] & 3) << 6);
  }
  uint8_t top[R];  // bit f: top bit of dim R * f + i
  for (int i = 0; i < R; ++i) {
    top[i] = static_cast<uint8_t>((c[i] >> 2 & 1) | (c[i + R] >> 1 & 2) |
                                  (c[i + 2 * R] & 4) | (c[i + 3 * R] << 1 & 8));
  }
  for (int i = 0; i < R / 2; ++i) {
    high[i] = static_cast<uint8_t>(top[i] | top[i + R / 2] << 4);
  }
}

template <int D>
inline void pack_3bit(uint8_t* low_plane, uint8_t* high_plane, int token,
                      const int8_t* codes) {
  uint8_t low[D / 4], high[D / 8];
  int dim = 0;
  for (; dim + 64 <= D; dim += 64) {
    pack_3bit_chunk<64>(codes + dim, low + dim / 4, high + dim / 8);
  }
  if constexpr ((D & 32) != 0) {
    pack_3bit_chunk<32>(codes + dim, low + dim / 4, high + dim / 8);
    dim += 32;
  }
  if constexpr ((D & 16) != 0) {
    pack_3bit_chunk<16>(codes + dim, low + dim / 4, high + dim / 8);
  }
  write_plane<D / 4>(low_plane, token, low);
  write_plane<D / 8>(high_plane, token, high);
}

template <int D>
inline void pack_2bit(uint8_t* plane, int token, const int8_t* codes) {
  uint8_t bytes[D / 4];
  for (int chunk = 0; chunk < D / 64; ++chunk) {
    const int8_t* c = codes + chunk * 64;
    for (int i = 0; i < 16; ++i) {
      bytes[chunk * 16 + i] =
          static_cast<uint8_t>(c[i] | c[i + 16] << 2 | c[i + 32] << 4 | c[i + 48] << 6);
    }
  }
  write_plane<D / 4>(plane, token, bytes);
}

template <int D>
inline void pack_value(uint8_t* tile, const TileLayout& layout, int token,
                       int plane_bits, const int8_t* codes) {
  uint8_t* plane = tile + layout.value_codes;
  if (plane_bits == 8) {
    write_plane<D>(plane, token, reinterpret_cast<const uint8_t*>(codes));
  } else if (plane_bits == 4) {
    uint8_t pairs[D / 2];
    for (int chunk = 0; chunk < D / 32; ++chunk) {
      const int8_t* c = codes + chunk * 32;
      for (int i = 0; i < 16; ++i) {
        pairs[chunk * 16 + i] = static_cast<uint8_t>(c[i] | c[i + 16] << 4);
      }
    }
    if constexpr ((D & 16) != 0) {
      const int8_t* c = codes + D - 16;
      for (int i = 0; i < 8; ++i) {
        pairs[D / 2 - 8 + i] = static_cast<uint8_t>(c[i] | c[i + 8] << 4);
      }
    }
    write_plane<D / 2>(plane, token, pairs);
  } else if (plane_bits == 3) {
    pack_3bit<D>(plane, tile + layout.value_high, token, codes);
  } else {
    pack_2bit<D>(plane, token, codes);
  }
}

// What a token's key or value becomes beside its codes.
struct RowScale {
  uint16_t scale = 0;
  uint16_t minimum = 0;  // of affine rows
};

template <int D>
inline RowScale quantize_codebook(int bits, float* x, int32_t max_bits, bool rotate,
                                  int8_t* codes) {
  switch (bits) {
    case 2:
      return {quantize_codebook<D, 2>(x, max_bits, rotate, codes), 0};
    case 3:
      return {quantize_codebook<D, 3>(x, max_bits, rotate, codes), 0};
    default:
      return {quantize_codebook<D, 4>(x, max_bits, rotate, codes), 0};
  }
}

template <int D>
inline RowScale quantize_key(const Format& format, float* x, int32_t max_bits,
                             int8_t* codes) {
  if (format.key_quantizer == Quantizer::kAffine) {
    const AffineScale affine =
        quantize_affine<D>(x, max_bits, format.key_bits, format.key_clip, codes);
    return {affine.step, affine.minimum};
  }
  if (format.key_quantizer == Quantizer::kCodebook) {
    return quantize_codebook<D>(format.key_bits, x, max_bits, false, codes);
  }
  const int max_code = (1 << (format.key_bits - 1)) - 1;
  return {quantize_symmetric<D>(x, max_bits, max_code, codes), 0};
}

template <int D>
inline RowScale quantize_value(const Format& format, float* x, int32_t max_bits,
                               int8_t* codes) {
  switch (format.value_quantizer) {
    case Quantizer::kSymmetric:
      return {quantize_symmetric<D>(x, max_bits, 127, codes), 0};
    case Quantizer::kCodebook:
      return quantize_codebook<D>(format.value_bits, x, max_bits, format.rotate != 0,
                                  codes);
    default:
      break;
  }
  if (format.rotate) {
    if (!rotate_any<D>(x, max_bits)) {
      std::memset(codes, 0, D);
      return {};
    }
    max_bits = max_magnitude_bits<D>(x);
  }
  const AffineScale affine =
      quantize_affine<D>(x, max_bits, format.value_bits, format.value_clip, codes);
  return {affine.step, affine.minimum};
}

// `key`: transformed, overwritten.
template <int D>
inline void store_token(const StoreArgs& args, const TileLayout& layout, int64_t t,
                        int head, float* key) {
  const Cache& cache = args.cache;
  const int64_t slot = args.slot_mapping[t];
  const int token = static_cast<int>(slot % cache.block_size);
  uint8_t* tile = cache.data + slot / cache.block_size * cache.block_stride +
                  head * cache.head_stride;
  alignas(64) float value[D];
  alignas(64) int8_t key_codes[D], value_codes[D];
  load_row<D>(value, args.value,
              t * args.value_token_stride + head * args.value_head_stride, args.dtype);
  const int32_t key_max = max_magnitude_bits<D>(key);
  const int32_t value_max = max_magnitude_bits<D>(value);

  const Format& format = cache.format;
  RowScale key_scale{kBf16NaN, 0}, value_scale{kBf16NaN, 0};
  if (key_max >= kNonFinite || value_max >= kNonFinite) {
    // The token is poisoned as a whole: who attends to it sees NaN, nobody else does.
    std::memset(key_codes, 0, D);
    std::memset(value_codes, 0, D);
  } else {
    key_scale = quantize_key<D>(format, key, key_max, key_codes);
    value_scale = quantize_value<D>(format, value, value_max, value_codes);
  }
  if (format.key_bits < 7) {
    pack_low_key<D>(tile, layout, format.key_bits, token, key_codes);
  } else {
    pack_key<D>(tile, token, key_codes, 1 << (format.key_bits - 1),
                format.key_bits == 7 ? value_codes : nullptr);
  }
  pack_value<D>(tile, layout, token, TileLayout::value_plane_bits(format), value_codes);
  const auto put = [&](int64_t section, uint16_t number) {
    std::memcpy(tile + section + 2 * token, &number, 2);
  };
  put(layout.key_scales, key_scale.scale);
  put(layout.value_scales, value_scale.scale);
  if (format.key_quantizer == Quantizer::kAffine) {
    put(layout.key_minimums, key_scale.minimum);
  }
  if (format.value_quantizer == Quantizer::kAffine) {
    put(layout.value_minimums, value_scale.minimum);
  }
}

template <int D>
inline void store_group(const StoreArgs& args, const TileLayout& layout,
                        const int64_t* tokens, int count, int head) {
  const RowTransform& transform = args.key_transform;
  alignas(64) float keys[kDenseRows * D];
  for (int i = 0; i < count; ++i) {
    load_row<D>(keys + i * D, args.key,
                tokens[i] * args.key_token_stride + head * args.key_head_stride,
                args.dtype);
    if (transform.centers) subtract<D>(keys + i * D, transform.centers + head * D);
  }
  if (transform.matrices) multiply_rows<D>(transform.matrices, head, keys, count);
  for (int i = 0; i < count; ++i) {
    transform_row<D>(keys + i * D, transform, head);
    store_token<D>(args, layout, tokens[i], head, keys + i * D);
  }
}

template <int D>
inline void store_range(const StoreArgs& args, int64_t begin, int64_t end) {
  const TileLayout layout(args.cache.format, D, args.cache.block_size);
  int64_t tokens[kDenseRows];
  int count = 0;
  for (int64_t t = begin; t < end; ++t) {
    if (args.slot_mapping[t] >= 0) tokens[count++] = t;
    if (count < kDenseRows && (t + 1 < end || count == 0)) continue;
    for (int head = 0; head < args.cache.num_kv_heads; ++head) {
      store_group<D>(args, layout, tokens, count, head);
    }
    count = 0;
  }
}

inline void store_tokens(const StoreArgs& args, int64_t begin, int64_t end) {
  with_head_dim(args.cache.head_dim,
                [&](auto dim) { store_range<dim>(args, begin, end); });
}

}  // namespace
}  // namespace polykv
