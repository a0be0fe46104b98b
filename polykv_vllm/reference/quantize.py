# SPDX-License-Identifier: Apache-2.0
"""From rows to codes and scales, and back. fp32 throughout, one rounding per step.

Sources: PolyKV (arXiv 2604.24971) for int8 keys and 3-bit rotated values, with
per-(token, head) scales; TurboQuant (arXiv 2504.19874) for rotation and codebook.
The value scale makes the norm of the dequantized row equal the row's own, which
costs nothing at run time and measured better than the plain RMS.
"""

import torch

from polykv_vllm.formats import CODEBOOKS, FormatSpec, power_blocks
from polykv_vllm.reference.lowbit import Affine, Quantized
from polykv_vllm.reference.rotation import (
    power_of_two,
    rotate,
    rotate_any,
    rotate_unnormalized,
)


def bf16_round_up(x: torch.Tensor) -> torch.Tensor:
    """Round non-negative fp32 to bf16 away from zero."""
    bits = (x.float().contiguous().view(torch.int32).long() + 0xFFFF) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def quantize_symmetric(rows: torch.Tensor, max_code: int) -> Quantized:
    """Quantize to integers in `-max_code..max_code`.

    Args:
        rows: `[..., head_dim]` fp32, finite.
        max_code: 127 or 63.

    """
    scale = bf16_round_up(rows.abs().amax(-1) / max_code)
    divisor = scale.float().unsqueeze(-1)
    codes = (rows / divisor).clamp(-max_code, max_code).round()
    codes = torch.where(divisor == 0, torch.zeros_like(codes), codes)
    return Quantized(codes.int(), scale)


_LANES = 16


def _halve(rows: torch.Tensor, width: int) -> torch.Tensor:
    while rows.shape[-1] > width:
        half = rows.shape[-1] // 2
        rows = rows[..., :half] + rows[..., half:]
    return rows


def _tree_sum(rows: torch.Tensor) -> torch.Tensor:
    # The order in which the kernels reduce: halves added to halves, in each block of
    # the rotation down to a vector's lanes; then the blocks, the last two first.
    *earlier, total = [
        _halve(block, _LANES) for block in rows.split(power_blocks(rows.shape[-1]), -1)
    ]
    for block in reversed(earlier):
        total = block + total
    return _halve(total, 1)[..., 0]


def quantize_rotated(rows: torch.Tensor, bits: int, rotated: bool = True) -> Quantized:
    """Rotate, then quantize with the Lloyd-Max codebook of `bits` bits.

    Rows whose largest magnitude is below 2^-125 get scale 0.

    Args:
        rows: `[..., head_dim]` fp32, finite.
        bits: 2, 3 or 4.
        rotated: False leaves the rotation out.

    """
    book = CODEBOOKS[bits]
    head_dim = rows.shape[-1]
    largest = rows.abs().amax(-1).contiguous()
    exponent = largest.view(torch.int32) >> 23
    lost = exponent <= 1
    exponent = exponent.clamp(min=2)
    # An exact power of two keeps the squares of any row in range.
    y = rows * power_of_two(255 - exponent).unsqueeze(-1)
    gain = 1  # of the unnormalised transform, in the square of a row's norm
    if rotated:
        y, gain = rotate_unnormalized(y), power_blocks(head_dim)[0]
    norm2 = _tree_sum(y * y)
    rms = torch.sqrt(norm2 / head_dim).unsqueeze(-1)
    boundaries = torch.tensor(book.boundaries, dtype=torch.float32)
    codes = (y.unsqueeze(-1) > boundaries * rms.unsqueeze(-1)).sum(
        -1, dtype=torch.int32
    )
    codes = torch.where(lost.unsqueeze(-1), torch.zeros_like(codes), codes)
    levels = torch.tensor(book.levels)[codes.long()]
    level_norm2 = (levels * levels).sum(-1) * gain
    scale = torch.sqrt(norm2 / level_norm2.float()) * power_of_two(exponent - 1)
    scale = torch.where(lost, torch.zeros_like(scale), scale)
    return Quantized(codes, scale.to(torch.bfloat16))


def quantize_affine(rows: torch.Tensor, bits: int, clip: float) -> Quantized:
    """Quantize to a minimum and `2^bits - 1` steps; see `lowbit.Affine`."""
    return Affine(bits, clip).quantize(rows)


def quantize_key(rows: torch.Tensor, fmt: FormatSpec) -> Quantized:
    """Quantize keys `[..., head_dim]` fp32."""
    if fmt.key_quantizer == "affine":
        return quantize_affine(rows, fmt.key_bits, fmt.key_clip)
    if fmt.key_quantizer == "codebook":
        quantized = quantize_rotated(rows, fmt.key_bits, rotated=False)
        levels = torch.tensor(CODEBOOKS[fmt.key_bits].levels, dtype=torch.int32)
        return quantized._replace(codes=levels[quantized.codes.long()])
    return quantize_symmetric(rows, fmt.key_max_code)


def quantize_value(rows: torch.Tensor, fmt: FormatSpec) -> Quantized:
    """Quantize values `[..., head_dim]` fp32."""
    rotated = fmt.value_rotation == "hadamard"
    if fmt.value_quantizer == "symmetric":
        return quantize_symmetric(rows, 127)
    if fmt.value_quantizer == "codebook":
        return quantize_rotated(rows, fmt.value_bits, rotated)
    if rotated:
        rows = rotate_any(rows)
    return quantize_affine(rows, fmt.value_bits, fmt.value_clip)


def _dequantize_affine(quantized: Quantized) -> torch.Tensor:
    return Affine(bits=0).dequantize(quantized)


def dequantize_key(quantized: Quantized) -> torch.Tensor:
    """Return keys `[..., head_dim]` fp32."""
    if quantized.minimum is not None:
        return _dequantize_affine(quantized)
    return quantized.codes.float() * quantized.scale.float().unsqueeze(-1)


def dequantize_value(quantized: Quantized, fmt: FormatSpec) -> torch.Tensor:
    """Return values `[..., head_dim]` fp32, rotated back."""
    scale = quantized.scale.float().unsqueeze(-1)
    if fmt.value_quantizer == "affine":
        rows = _dequantize_affine(quantized)
    elif fmt.value_quantizer == "codebook":
        levels = torch.tensor(CODEBOOKS[fmt.value_bits].levels)
        rows = levels[quantized.codes.long()].float() * scale
    else:
        rows = quantized.codes.float() * scale
    return rotate(rows) if fmt.value_rotation == "hadamard" else rows
