# SPDX-License-Identifier: Apache-2.0
"""Ways to quantize rows, as what they give back: for `benchmarks.codec` only.

Rows are `[..., head_dim]` fp32. Ours are those of `polykv_vllm.reference`; vLLM's are
written from what its formats are documented to store, with its own numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from polykv_vllm.formats import CODEBOOKS, FormatSpec
from polykv_vllm.reference.quantize import (
    dequantize_key,
    dequantize_value,
    quantize_symmetric,
    quantize_value,
)
from polykv_vllm.reference.rotation import rotate

Codec = Callable[[torch.Tensor], torch.Tensor]
RowScale = Literal["rms", "norm", "least_squares", "unbiased", "tensor"]


def symmetric(bits: int) -> Codec:
    """Integers with one bf16 scale per row, from its largest magnitude."""
    max_code = (1 << (bits - 1)) - 1
    return lambda rows: dequantize_key(quantize_symmetric(rows, max_code))


def our_value(fmt: FormatSpec) -> Codec:
    """The values of one of our formats."""
    return lambda rows: dequantize_value(quantize_value(rows, fmt), fmt)


@cache
def lloyd_max(bits: int) -> torch.Tensor:
    """Return the centroids of N(0, 1), ascending: ours, or found by iteration."""
    if bits in CODEBOOKS:
        return torch.tensor(CODEBOOKS[bits].centroids)
    grid = torch.linspace(-7, 7, 100_001, dtype=torch.float64)
    weight = torch.exp(-grid * grid / 2)
    count = 1 << bits
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    centroids = torch.distributions.Normal(0.0, 1.0).icdf(shares) * 1.2
    for _ in range(2000):
        cells = torch.bucketize(grid, (centroids[1:] + centroids[:-1]) / 2)
        mass = torch.zeros(count, dtype=torch.float64).index_add_(0, cells, weight)
        sums = torch.zeros_like(mass).index_add_(0, cells, weight * grid)
        centroids = sums / mass
    return centroids.float()


@dataclass(frozen=True)
class Gaussian:
    """Levels for a Gaussian, the row scaled to unit variance.

    Attributes:
        bits: Of a code.
        scale: What makes the dequantized row fit: the row's own RMS, its norm, least
            squares, an unbiased product with the row, or one RMS for the whole tensor.
        rotated: Whether the row is Hadamard-rotated before.
        uniform: Evenly spaced levels (of least error) instead of Lloyd-Max ones.

    """

    bits: int
    scale: RowScale = "norm"
    rotated: bool = True
    uniform: bool = False

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize."""
        turned = rotate(rows) if self.rotated else rows
        levels = uniform_levels(self.bits) if self.uniform else lloyd_max(self.bits)
        dim = None if self.scale == "tensor" else -1
        rms = turned.square().mean(dim, keepdim=True).sqrt().clamp(min=1e-30)
        unit = turned / rms
        codes = levels[torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)]
        if self.scale == "tensor":
            out = codes * rms
        else:
            out = codes * (rms * self._gain(unit, codes)).bfloat16().float()
        return rotate(out) if self.rotated else out

    def _gain(self, unit: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a * b).sum(-1, keepdim=True).clamp(min=1e-30)

        if self.scale == "norm":
            return (dot(unit, unit) / dot(codes, codes)).sqrt()
        if self.scale == "least_squares":
            return dot(unit, codes) / dot(codes, codes)
        if self.scale == "unbiased":
            return dot(unit, unit) / dot(unit, codes)
        return torch.ones_like(unit[..., :1])


_STEPS = {3: 0.5860, 4: 0.3352, 5: 0.1881}
"""Steps of the uniform quantizer of N(0, 1) of least error (Max 1960)."""


def uniform_levels(bits: int) -> torch.Tensor:
    """Return evenly spaced levels for N(0, 1)."""
    count = 1 << bits
    return (torch.arange(count) - (count - 1) / 2) * _STEPS[bits]


def affine(bits: int) -> Codec:
    """Return vLLM's values: evenly between minimum and maximum, both fp16, per row."""

    def codec(rows: torch.Tensor) -> torch.Tensor:
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        step = ((high - low) / ((1 << bits) - 1)).half().float().clamp(min=1e-8)
        low = low.half().float()
        codes = ((rows - low) / step + 0.5).floor().clamp(0, (1 << bits) - 1)
        return codes * step + low

    return codec


def int4_per_token_head(rows: torch.Tensor) -> torch.Tensor:
    """vLLM's: rotated, 16 steps from minimum to maximum, an integer zero point.

    Its rotation has random signs before the Hadamard transform; here it has none.
    """
    turned = rotate(rows)
    low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-6)
    zero = (-low / step).round()
    codes = ((turned / step).round() + zero).clamp(0, 15)
    return rotate((codes - zero) * step)


def fp8(rows: torch.Tensor) -> torch.Tensor:
    """E4M3 with scale 1, vLLM's fp8 cache without calibrated scales."""
    return rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def exact(rows: torch.Tensor) -> torch.Tensor:
    """Keep the row."""
    return rows
