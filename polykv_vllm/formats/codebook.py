# SPDX-License-Identifier: Apache-2.0
"""Codebooks: Lloyd-Max quantizers of N(0, 1) with integer levels.

Attention multiplies the levels by 8-bit probabilities in int8 dot products, so
the levels of a format *are* small integers: `level / unit` is a Lloyd-Max
centroid to within 0.0016 (3 bits) and 0.0065 (4 bits). The units were chosen by
a search over all that fit in an int8; the mean squared error on N(0, 1) rises
from 0.117482 to 0.117482 (2 bits), from 0.034548 to 0.034549 (3 bits) and from
0.009501 to 0.009516 (4 bits).

Source: centroids of TurboQuant (arXiv 2504.19874) for a unit Gaussian.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Codebook:
    """A symmetric scalar quantizer for values of unit variance.

    Attributes:
        bits: Width of a code.
        levels: The int8 level of each code, ascending; `2**bits` of them.
        unit: Levels per standard deviation.

    """

    bits: int
    levels: tuple[int, ...]
    unit: float

    @property
    def centroids(self) -> tuple[float, ...]:
        """Reconstruction points in units of the row's standard deviation."""
        return tuple(level / self.unit for level in self.levels)

    @property
    def boundaries(self) -> tuple[float, ...]:
        """Decision points: code = number of boundaries below the value."""
        pairs = zip(self.levels, self.levels[1:], strict=False)
        return tuple((low + high) * 0.5 / self.unit for low, high in pairs)


def _symmetric(bits: int, positive: tuple[int, ...], unit: float) -> Codebook:
    return Codebook(bits, tuple(-x for x in reversed(positive)) + positive, unit)


CODEBOOKS: dict[int, Codebook] = {
    2: _symmetric(2, (36, 120), 79.47),
    3: _symmetric(3, (10, 31, 55, 88), 40.92),
    4: _symmetric(4, (6, 17, 29, 42, 56, 72, 92, 122), 44.55),
}
"""Codebook by number of bits."""
