# SPDX-License-Identifier: Apache-2.0
"""Device code from rows to codes, scales and bytes: reference/quantize.py and pack.py.

Every step rounds as the reference does, so that the bytes are the same.
"""

import triton
import triton.language as tl

from polykv_vllm.kernels.triton.rows import (
    bf16_bits,
    bits_of,
    float_of,
    fwht,
    round_to_int,
    tree_sum,
)


@triton.jit
def quantize_symmetric(x, max_bits, MAX_CODE: tl.constexpr):
    """Return codes `[rows, D]` and the bits of the bf16 scale `[rows]`, rounded up."""
    largest = tl.div_rn(float_of(max_bits), max_bits.to(tl.float32) * 0 + MAX_CODE)
    scale = (bits_of(largest) + 0xFFFF) >> 16
    divisor = float_of(scale << 16)[:, None]
    usable = tl.where(divisor == 0, 1.0, divisor)
    ratio = tl.div_rn(x, tl.broadcast_to(usable, x.shape))
    top = MAX_CODE * 1.0
    codes = round_to_int(tl.minimum(tl.maximum(ratio, -top), top))
    return tl.where(divisor == 0, 0, codes), scale


@triton.jit
def quantize_rotated(x, max_bits, T: tl.constexpr, ROWS: tl.constexpr):
    """Return Lloyd-Max codes of the rotated rows and the bits of the bf16 scale."""
    D: tl.constexpr = T.head_dim
    exponent = max_bits >> 23
    lost = exponent <= 1  # below 2^-125: no scale could hold it
    exponent = tl.maximum(exponent, 2)
    y = fwht(x * float_of((255 - exponent) << 23)[:, None], ROWS, T)
    norm2 = tree_sum(y * y, ROWS, T)
    rms = tl.sqrt_rn(norm2 * (1.0 / D))  # D is a power of two: an exact division
    codes = tl.zeros((ROWS, D), tl.int32)
    squares = tl.full((ROWS, D), T.levels[0] * T.levels[0], tl.int32)
    for i in tl.static_range(len(T.boundaries)):
        above = (y > (rms * T.boundaries[i])[:, None]).to(tl.int32)
        codes += above
        squares += above * T.square_steps[i]
    level_norm2 = (tl.sum(squares, axis=1) * D).to(tl.float32)
    ratio = tl.sqrt_rn(tl.div_rn(norm2, level_norm2))
    scale = bf16_bits(ratio * float_of((exponent - 1) << 23))
    return tl.where(lost[:, None], 0, codes), tl.where(lost, 0, scale)


@triton.jit
def pack_low_plane(codes, ROWS: tl.constexpr, D: tl.constexpr):
    """Return bytes `[rows, D/4]` with the low two bits of 3-bit codes."""
    field = tl.arange(0, 4)[None, None, :, None]
    parts = (tl.reshape(codes, (ROWS, D // 64, 4, 16)) & 3) << (2 * field)
    return tl.reshape(tl.sum(parts, axis=2), (ROWS, D // 4))


@triton.jit
def pack_high_plane(codes, ROWS: tl.constexpr, D: tl.constexpr):
    """Return bytes `[rows, D/8]` with bit 2 of the codes."""
    place = tl.arange(0, 8)[None, None, :, None]  # 2 * field + half
    shift = (place >> 1) + 4 * (place & 1)
    parts = ((tl.reshape(codes, (ROWS, D // 64, 8, 8)) >> 2) & 1) << shift
    return tl.reshape(tl.sum(parts, axis=2), (ROWS, D // 8))


@triton.jit
def pack_nibbles(codes, ROWS: tl.constexpr, D: tl.constexpr):
    """Return bytes `[rows, D/2]` with two 4-bit codes each."""
    half = tl.arange(0, 2)[None, None, :, None]
    parts = tl.reshape(codes, (ROWS, D // 32, 2, 16)) << (4 * half)
    return tl.reshape(tl.sum(parts, axis=2), (ROWS, D // 2))
