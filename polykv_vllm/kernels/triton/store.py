# SPDX-License-Identifier: Apache-2.0
"""The store: rotate, quantize, pack and scatter, in one launch for a layer."""

import triton
import triton.language as tl

from polykv_vllm.kernels.triton.quantize import (
    pack_high_plane,
    pack_low_plane,
    pack_nibbles,
    quantize_rotated,
    quantize_symmetric,
)
from polykv_vllm.kernels.triton.rows import (
    NON_FINITE,
    key_order,
    load_rows,
    max_magnitude_bits,
    transform_rows,
)


@triton.jit
def _write_plane(tile, plane, token, codes, mask, ROWS: tl.constexpr):
    """Write bytes `[tokens, ROWS]` into a plane `[subtiles][ROWS][16 tokens]`."""
    row = tl.arange(0, ROWS)[None, :]
    at = (token // 16 * ROWS)[:, None] * 16 + row * 16 + (token % 16)[:, None]
    tl.store(tile[:, None] + plane + at, codes.to(tl.uint8), mask=mask[:, None])


@triton.jit
def _write_scales(tile, offset, token, bits, mask):
    place = (tile + offset + 2 * token).to(tl.pointer_type(tl.int16))
    tl.store(place, bits.to(tl.int16), mask=mask)


@triton.jit
def _write_values(tile, token, codes, mask, T: tl.constexpr, TOKENS: tl.constexpr):
    D: tl.constexpr = T.head_dim
    if T.plane_bits == 8:
        _write_plane(tile, T.values_at, token, codes & 0xFF, mask, D)
    elif T.plane_bits == 4:
        nibbles = pack_nibbles(codes, TOKENS, D)
        _write_plane(tile, T.values_at, token, nibbles, mask, D // 2)
    else:
        low = pack_low_plane(codes, TOKENS, D)
        _write_plane(tile, T.values_at, token, low, mask, D // 4)
        high = pack_high_plane(codes, TOKENS, D)
        _write_plane(tile, T.high_at, token, high, mask, D // 8)


@triton.jit
def _quantize(k, v, T: tl.constexpr, TOKENS: tl.constexpr):
    """Return the codes and scale bits of keys and values.

    A token with an inf or a NaN anywhere is poisoned as a whole: zero codes, NaN
    scales. Who attends to it sees NaN, nobody else does.
    """
    k_max = max_magnitude_bits(k)
    v_max = max_magnitude_bits(v)
    poisoned = (k_max >= NON_FINITE) | (v_max >= NON_FINITE)
    k = tl.where(poisoned[:, None], 0.0, k)
    v = tl.where(poisoned[:, None], 0.0, v)
    k_max = tl.where(poisoned, 0, k_max)
    v_max = tl.where(poisoned, 0, v_max)
    k_codes, k_scale = quantize_symmetric(k, k_max, (1 << (T.key_bits - 1)) - 1)
    if T.rotated:
        v_codes, v_scale = quantize_rotated(v, v_max, T, TOKENS)
    else:
        v_codes, v_scale = quantize_symmetric(v, v_max, 127)
    k_scale = tl.where(poisoned, 0x7FC0, k_scale)
    return k_codes, k_scale, v_codes, tl.where(poisoned, 0x7FC0, v_scale)


@triton.jit
def store_kernel(
    key,
    value,
    cache,
    slot_mapping,
    multipliers,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    head_stride,
    norm,
    T: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    ROTATED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Quantize and write `TOKENS` tokens of one KV head; grid (tokens, KV heads).

    `key` and `value` are `[num_tokens, kv_heads, D]` (bf16 as int16), `cache` is uint8
    in the order of `GpuTileLayout`, `multipliers` `[kv_heads, D]` fp32. Tokens with a
    negative slot are skipped.
    """
    D: tl.constexpr = T.head_dim
    head = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + t, mask=t < num_tokens, other=-1)
    mask = slot >= 0
    slot = tl.where(mask, slot, 0)
    dim = tl.arange(0, D)[None, :]
    k_at = t[:, None] * key_token_stride + head * key_head_stride + dim
    v_at = t[:, None] * value_token_stride + head * value_head_stride + dim
    k = load_rows(key + k_at, mask[:, None], DTYPE)
    v = load_rows(value + v_at, mask[:, None], DTYPE)
    k = transform_rows(k, multipliers + head * D, norm, SCALED, ROTATED, TOKENS, T)
    k_codes, k_scale, v_codes, v_scale = _quantize(k, v, T, TOKENS)

    token = (slot % T.block_size).to(tl.int32)
    tile = cache + slot // T.block_size * block_stride + head * head_stride
    k_bytes = k_codes + (1 << (T.key_bits - 1))
    if T.key_bits == 7:
        k_bytes = k_bytes | ((v_codes >> 3) << 7)
    k_bytes = key_order(k_bytes, TOKENS, D).to(tl.uint8)
    tl.store(tile[:, None] + token[:, None] * D + dim, k_bytes, mask=mask[:, None])
    _write_values(tile, token, v_codes, mask, T, TOKENS)
    _write_scales(tile, T.key_scales_at, token, k_scale, mask)
    _write_scales(tile, T.value_scales_at, token, v_scale, mask)
