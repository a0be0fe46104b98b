# SPDX-License-Identifier: Apache-2.0
"""Device code for rows `[rows, D]` in fp32: load, rotate, round. One rounding a step.

What is compared bit for bit with the reference (quantization) uses correctly rounded
division and square root, and adds in the reference's order.
"""

import triton
import triton.language as tl

BF16, FP16, FP32 = 0, 1, 2

# 1.5 * 2^23: adding it to |x| < 2^22 leaves the nearest integer (ties to even) in the
# low bits of the sum. A conversion instruction runs at a quarter of the rate.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
NON_FINITE = tl.constexpr(0x7F800000)


@triton.jit
def float_of(bits):
    """Reinterpret int32 as fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(x):
    """Reinterpret fp32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def round_to_int(x):
    """Return the nearest int32 of |x| < 2^22, ties to even."""
    return bits_of(x + MAGIC) - MAGIC_BITS


@triton.jit
def load_rows(pointers, mask, DTYPE: tl.constexpr):
    """Load as fp32; bf16 comes as int16, so that every GPU can."""
    if DTYPE == 0:
        bits = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        x = float_of(bits << 16)
    else:
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def bf16_bits(x):
    """Round fp32 to the bits of bf16, ties to even, as int32; NaN stays NaN."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > NON_FINITE, 0x7FC0, rounded)


@triton.jit
def store_rows(pointers, x, mask, DTYPE: tl.constexpr):
    """Store fp32 as the dtype of the rows."""
    if DTYPE == 0:
        tl.store(pointers, bf16_bits(x).to(tl.int16), mask=mask)
    elif DTYPE == 1:
        tl.store(pointers, x.to(tl.float16), mask=mask)
    else:
        tl.store(pointers, x, mask=mask)


@triton.jit
def fwht(x, ROWS: tl.constexpr, T: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform, from the widest distance down."""
    D: tl.constexpr = T.head_dim
    STAGES: tl.constexpr = T.log2_dim
    for i in tl.static_range(STAGES):
        # Distance D >> (i + 1): pairs become the last axis, are added and subtracted.
        pairs = tl.reshape(x, (ROWS, 1 << i, 2, D >> (i + 1)))
        low, high = tl.split(tl.trans(pairs, (0, 1, 3, 2)))
        both = tl.join(low + high, low - high)
        x = tl.reshape(tl.trans(both, (0, 1, 3, 2)), (ROWS, D))
    return x


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, T: tl.constexpr):
    """Sum each row, halves added to halves: the reference's order."""
    D: tl.constexpr = T.head_dim
    STAGES: tl.constexpr = T.log2_dim
    for i in tl.static_range(STAGES):
        halves = tl.reshape(x, (ROWS, 2, D >> (i + 1)))
        low, high = tl.split(tl.trans(halves, (0, 2, 1)))
        x = low + high
    return tl.reshape(x, (ROWS,))


@triton.jit
def max_magnitude_bits(x):
    """Return each row's largest magnitude as bits; >= NON_FINITE tells of inf, NaN."""
    return tl.max(bits_of(x) & 0x7FFFFFFF, axis=1)


@triton.jit
def key_order(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Permute the dimensions into the order of a tile's keys (gpu_layout.py)."""
    blocks = tl.reshape(x, (ROWS, D // 64, 8, 8))
    return tl.reshape(tl.trans(blocks, (0, 1, 3, 2)), (ROWS, D))


@triton.jit
def transform_rows(
    x,
    multipliers,
    norm,
    SCALED: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
    T: tl.constexpr,
):
    """Apply a key treatment: multiply by channel, then rotate.

    `multipliers` points to the `D` of the rows' KV head, or to such a pointer for each
    row; `norm` is D^-0.5.
    """
    if SCALED:
        x = x * tl.load(multipliers + tl.arange(0, T.head_dim)[None, :])
    if ROTATED:
        x = fwht(x, ROWS, T) * norm
    return x
