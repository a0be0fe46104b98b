# SPDX-License-Identifier: Apache-2.0
"""Walsh-Hadamard transform in natural (Sylvester) order, and rotations made of it."""

import torch

from polykv_vllm.formats import power_blocks


def fwht(rows: torch.Tensor) -> torch.Tensor:
    """Return the unnormalised transform of each row.

    The stages run from the widest distance to the narrowest; with fp32 input the
    kernels, which do the same, agree bit for bit.

    Args:
        rows: `[..., head_dim]`, head_dim a power of two.

    """
    head_dim = rows.shape[-1]
    if head_dim & (head_dim - 1):
        raise ValueError(f"head dimension {head_dim} is not a power of two")
    distance = head_dim // 2
    while distance:
        pairs = rows.unflatten(-1, (-1, 2, distance))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        rows = torch.stack((low + high, low - high), -2).flatten(-3)
        distance //= 2
    return rows


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Multiply each row by an orthonormal matrix that is its own inverse.

    It is the Hadamard matrix, or where head_dim is no power of two one after the other
    for each of its `power_blocks`.
    """
    blocks = rows.split(power_blocks(rows.shape[-1]), -1)
    # A product, as the kernels have it: the same bits.
    return torch.cat([fwht(block) * block.shape[-1] ** -0.5 for block in blocks], -1)


def rotate_unnormalized(rows: torch.Tensor) -> torch.Tensor:
    """Return `rotate` times the square root of the widest block."""
    sizes = power_blocks(rows.shape[-1])
    parts = []
    for block, size in zip(rows.split(sizes, -1), sizes, strict=True):
        turned = fwht(block)
        ratio = sizes[0] // size
        parts.append(turned if ratio == 1 else turned * ratio**0.5)
    return torch.cat(parts, -1)


def rotate_any(rows: torch.Tensor) -> torch.Tensor:
    """Rotate rows of any finite size.

    An exact power of two keeps the sums of large rows in range; elements beyond fp32
    become its largest number. Rows whose largest magnitude is below 2^-125 become zero.

    Args:
        rows: `[..., head_dim]` fp32, finite.

    """
    exponent = rows.abs().amax(-1, keepdim=True).contiguous().view(torch.int32) >> 23
    lost = exponent <= 1
    exponent = exponent.clamp(min=2)
    rotated = rotate(rows * power_of_two(255 - exponent)) * power_of_two(exponent - 1)
    limit = torch.finfo(torch.float32).max
    return torch.where(lost, 0.0, rotated.clamp(-limit, limit))


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return the fp32 number of a biased exponent 1..254, int32."""
    return (exponent << 23).view(torch.float32)
