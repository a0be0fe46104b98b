# SPDX-License-Identifier: Apache-2.0
"""Device code: one tile's softmax in integers, and the folding of partial results.

What a tile gives a row is a function of the row and the tile alone, in every bit,
whatever the shape of the program that computes it: scores are exact integer sums, the
maximum has no order, weights are rounded to integers and summed as such, and the
weighted values are exact integer sums again. So decode, shared prefixes and prefill
agree bit for bit, if they fold tiles in one order: ascending within a split of 512
tokens, then splits ascending.
"""

import triton
import triton.language as tl

from polykv_vllm.kernels.triton.rows import (
    MAGIC,
    MAGIC_BITS,
    NON_FINITE,
    bits_of,
    float_of,
    round_to_int,
)
from polykv_vllm.kernels.triton.unpack import int8_dot

# Both terms of a probability fit in int8: 127 * 256 + 127.
PROB_MAX = tl.constexpr(32639.0)
PROB_TINY = tl.constexpr(2e-34)  # below, the reciprocal would leave fp32
# Weights are at most 1 and are summed in units of 2^-21.
WEIGHT_UNITS = tl.constexpr(2097152.0)
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def two_term_dot(high, low, b, STACKED: tl.constexpr, INT8: tl.constexpr):
    """Return (256 * high + low) . b.

    With few rows both terms are one matrix, the low rows below the high ones (`high`
    is that matrix): they fill rows of the instruction that would be padding.
    """
    if STACKED:
        both = int8_dot(high, b, INT8)
        pair = tl.reshape(both, (2, high.shape[0] // 2, b.shape[1]))
        weight = 256 - 255 * tl.arange(0, 2)[:, None, None]
        out = tl.sum(pair * weight, axis=0)
    elif INT8:
        # On top of the first product: one accumulator in registers, not two.
        out = int8_dot(high, b, INT8) * 256
        out = tl.dot(low, b, out, out_dtype=tl.int32)
    else:
        out = int8_dot(high, b, INT8) * 256 + int8_dot(low, b, INT8)
    return out


@triton.jit
def tile_probabilities(scores, row_scale, value_scale, visible):
    """Turn scores into integer probabilities, weighted by the values' scales.

    Args:
        scores: `[rows, tokens]` fp32, keys' scales multiplied in.
        row_scale: `[rows]` fp32, to base 2, positive.
        value_scale: `[tokens]` fp32, finite and not negative.
        visible: `[rows, tokens]`, what each row attends to.

    Returns:
        Codes `[rows, tokens]` int32, the value of their unit, the maximum (base 2) and
        the sum of the weights, each `[rows]` fp32.

    """
    scores = tl.where(visible, scores, MINUS_INF)
    highest = tl.max(scores, axis=1)
    hidden = highest == MINUS_INF
    offset = tl.where(hidden, 0.0, highest * row_scale)
    weight = tl.exp2(tl.fma(scores, row_scale[:, None], -offset[:, None]))
    units = bits_of(tl.fma(weight, WEIGHT_UNITS, MAGIC)) - MAGIC_BITS
    total = tl.sum(units, axis=1).to(tl.float32) * (1.0 / WEIGHT_UNITS)
    prob = weight * value_scale[None, :]
    largest = tl.max(prob, axis=1)
    usable = largest > PROB_TINY
    unit = tl.where(usable, PROB_MAX / tl.where(usable, largest, 1.0), 0.0)
    codes = round_to_int(prob * unit[:, None])
    factor = tl.where(usable, largest * (1.0 / PROB_MAX), 0.0)
    return codes, factor, tl.where(hidden, MINUS_INF, offset), total


@triton.jit
def int8_terms(codes, STACKED: tl.constexpr):
    """Split codes up to 32639 into 256 * high + low, both int8 (see two_term_dot)."""
    high = ((codes + 128) >> 8).to(tl.int8)
    low = codes.to(tl.int8)  # the low byte, as a signed number
    if STACKED:
        rows: tl.constexpr = codes.shape[0]
        both = tl.trans(tl.join(high, low), (2, 0, 1))
        high = tl.reshape(both, (2 * rows, codes.shape[1]))
    return high, low


@triton.jit
def finite_scales(bits):
    """Return scales `[tokens]` fp32 with NaN and inf as 0, and which ones these are."""
    bad = (bits & 0x7FFFFFFF) >= NON_FINITE
    return float_of(tl.where(bad, 0, bits)), bad


@triton.jit
def fold_weights(peak, total, part_peak, part_total):
    """Return the folded maximum and sum, and what the old and new values weigh.

    A state is (maximum, sum of weights, weighted values), the latter two relative to
    the maximum. An empty part changes nothing.
    """
    top = tl.maximum(peak, part_peak)
    offset = tl.where(top == MINUS_INF, 0.0, top)
    old = tl.exp2(peak - offset)
    fresh = tl.exp2(part_peak - offset)
    return top, tl.fma(part_total, fresh, total * old), old, fresh


@triton.jit
def fold_values(acc, old, part, fresh):
    """Fold a part's values `[rows, dims]` into a state's, one rounding each."""
    weight = tl.broadcast_to(fresh[:, None], part.shape)
    return tl.fma(part, weight, acc * old[:, None])
