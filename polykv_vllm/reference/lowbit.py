# SPDX-License-Identifier: Apache-2.0
"""Uniform quantizers for two to four bits: one row of a head, 16-bit scales.

    Quest    symmetric, levels at (q + 1/2) step, the step from the row's RMS
    Affine   evenly between a minimum and a maximum, clipped at a percentile of |x|

Sources: QuEST (arXiv 2502.05003) as WUSH-KV uses it (arXiv 2609.38121, equation 5), and
OSCAR's quantizer (arXiv 2605.17757; equation 7 of WUSH-KV).

Scales are bf16, which has fp32's range: a row of norm 1e5, whose fp16 scale would
overflow, keeps one. Codes are computed with the rounded scale, so rounding moves the
grid and adds no error of its own. `Affine` stores the minimum and not the zero point
z = -minimum / step: the minimum is bounded by the row, z grows without bound as the row
gets flat, and as it is no integer its rounding would shift every element.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

ALPHA: dict[int, float] = {
    1: 0.79788456,
    2: 1.49353462,
    3: 2.05106835,
    4: 2.51393058,
    5: 2.91609388,
    6: 3.27659728,
    7: 3.60104972,
    8: 3.88493868,
}
"""Half the span of the levels, in standard deviations, of least error for N(0, 1)."""

KEY_CLIP: dict[int, float] = {2: 0.96, 3: 0.96}
VALUE_CLIP: dict[int, float] = {2: 0.92, 3: 0.96}
"""Percentile of `Affine` by bits; no clip where none is named: from 4 bits on it costs
more than it gains."""

BITS: tuple[int, ...] = (2, 3, 4)
QuantizerName = Literal["quest", "affine"]
QUANTIZERS: tuple[QuantizerName, ...] = ("quest", "affine")


class Quantized(NamedTuple):
    """Codes and scales of rows.

    Attributes:
        codes: `[..., head_dim]` int32; of the quantizers here 0..2^bits - 1. Signed for
            symmetric ones; of codebooks the level itself for keys, its index for
            values.
        scale: `[...]`, of the quantizers here the step between two levels; bf16 in a
            format.
        minimum: `[...]`, the level of code 0 of affine quantizers; else None.

    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None


class Quantizer(Protocol):
    """Rows to codes and back; a row depends on no other."""

    @property
    def bits(self) -> int:
        """Of a code."""
        ...

    @property
    def scale_bits(self) -> int:
        """Of all scales of a row together."""
        ...

    def quantize(self, rows: torch.Tensor) -> Quantized:
        """Quantize `[..., head_dim]` fp32."""
        ...

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return `[..., head_dim]` fp32."""
        ...


@dataclass(frozen=True)
class Quest:
    """Symmetric and mid-rise: no level is zero, half of them are negative.

    Attributes:
        bits: 1..8.
        scale_dtype: Of the stored step; fp32 for comparison with published figures.

    """

    bits: int
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def scale_bits(self) -> int:
        """Of the step."""
        return 8 * self.scale_dtype.itemsize

    def quantize(self, rows: torch.Tensor) -> Quantized:
        """Quantize `[..., head_dim]` fp32; a row of zeros gets step 0."""
        rows = rows.float()
        largest = rows.abs().amax(-1, keepdim=True)
        unit = rows / torch.where(largest > 0, largest, 1)  # squares stay in range
        rms = unit.square().mean(-1, keepdim=True).sqrt() * largest
        # The factor first: 2^bits - 1 steps span less than the row's largest double.
        step = rms * (2 * ALPHA[self.bits] / ((1 << self.bits) - 1))
        step = _rounded(step, self.scale_dtype)
        half = 1 << (self.bits - 1)
        codes = _divided(rows, step).floor().clamp(-half, half - 1)
        return Quantized((codes + half).int(), step.squeeze(-1).to(self.scale_dtype))

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return `[..., head_dim]` fp32."""
        centred = quantized.codes.float() + (0.5 - (1 << (self.bits - 1)))
        return _finite(centred * quantized.scale.float().unsqueeze(-1))


@dataclass(frozen=True)
class Affine:
    """Evenly spaced from the smallest to the largest element, both clipped.

    Attributes:
        bits: 1..8.
        clip: Elements are clipped to the `clip` quantile of the row's magnitudes;
            0: they are not.
        scale_dtype: Of the stored step and minimum.

    """

    bits: int
    clip: float = 0.0
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def scale_bits(self) -> int:
        """Of step and minimum."""
        return 16 * self.scale_dtype.itemsize

    def quantize(self, rows: torch.Tensor) -> Quantized:
        """Quantize `[..., head_dim]` fp32; a flat row is its minimum."""
        rows = rows.float()
        if self.clip:
            head_dim = rows.shape[-1]
            place = min(int(self.clip * head_dim), head_dim - 1)
            bound = rows.abs().sort(-1).values[..., place, None]
            rows = rows.clamp(-bound, bound)
        # Adding zero makes -0 the 0 that it equals: the kernels store the same bytes.
        minimum = _rounded(rows.amin(-1, keepdim=True) + 0.0, self.scale_dtype)
        levels = (1 << self.bits) - 1
        # Divided first: the span of a row near the largest float is none.
        step = (rows.amax(-1, keepdim=True) + 0.0) / levels - minimum / levels
        step = _rounded(step.clamp(min=0), self.scale_dtype)
        # In halves, as the span may be none; a power of two changes no rounding.
        codes = _divided(rows / 2 - minimum / 2, step / 2).add(0.5).floor()
        codes = codes.clamp(0, levels)
        return Quantized(
            codes.int(),
            step.squeeze(-1).to(self.scale_dtype),
            minimum.squeeze(-1).to(self.scale_dtype),
        )

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return `[..., head_dim]` fp32."""
        if quantized.minimum is None:
            raise ValueError("these codes have no minimum: they are not of Affine")
        step = quantized.scale.float().unsqueeze(-1)
        minimum = quantized.minimum.float().unsqueeze(-1)
        # In halves: the span of a row near the largest float is none.
        half = quantized.codes.float() * (step / 2) + minimum / 2
        return _finite(half * 2)


def quantizer(name: str, bits: int, role: Literal["key", "value"]) -> Quantizer:
    """Return a quantizer as the clip tables want it.

    Args:
        name: One of `QUANTIZERS`.
        bits: Of a code.
        role: Whose rows.

    Raises:
        ValueError: There is no such quantizer.

    """
    if name == "quest":
        return Quest(bits)
    if name == "affine":
        table = KEY_CLIP if role == "key" else VALUE_CLIP
        return Affine(bits, table.get(bits, 0.0))
    raise ValueError(
        f"there is no quantizer {name!r}; there are: {', '.join(QUANTIZERS)}"
    )


def _rounded(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to what is stored, but not up to infinity."""
    limit = torch.finfo(dtype).max
    return scale.clamp(-limit, limit).to(dtype).float()


def _finite(rows: torch.Tensor) -> torch.Tensor:
    """Bring the outermost levels of a row near the largest float back into range.

    A NaN stays one.
    """
    limit = torch.finfo(torch.float32).max
    return rows.clamp(-limit, limit)


def _divided(rows: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Divide, with zeros where the step is zero."""
    return torch.where(step > 0, rows / torch.where(step > 0, step, 1), 0)
