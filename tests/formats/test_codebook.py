# SPDX-License-Identifier: Apache-2.0
"""The integer codebooks against Lloyd-Max quantizers derived here from N(0, 1)."""

import math
from itertools import pairwise

import pytest

from polykv_vllm.formats import CODEBOOKS


def density(x: float) -> float:
    """Density of N(0, 1)."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    """P(X < x) for X ~ N(0, 1)."""
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def moments(a: float, b: float) -> tuple[float, float, float]:
    """Return the integrals of 1, x and x^2 times the density over [a, b]."""
    mass, first = below(b) - below(a), density(a) - density(b)
    edges = [x * density(x) if math.isfinite(x) else 0.0 for x in (a, b)]
    return mass, first, mass + edges[0] - edges[1]


def cells(boundaries: list[float]) -> list[tuple[float, float]]:
    """Return the intervals between boundaries, open ends included."""
    return list(pairwise([-math.inf, *boundaries, math.inf]))


def lloyd_max(bits: int) -> list[float]:
    """Alternate centroids and midpoints until nothing moves."""
    count = 2**bits
    levels = [4 * (i + 0.5) / count - 2 for i in range(count)]
    for _ in range(5000):
        middles = [(a + b) / 2 for a, b in pairwise(levels)]
        fresh = [moments(a, b)[1] / moments(a, b)[0] for a, b in cells(middles)]
        moved = max(abs(a - b) for a, b in zip(levels, fresh, strict=True))
        levels = fresh
        if moved < 1e-13:
            return levels
    raise AssertionError("no convergence")


def mean_squared_error(levels: list[float], boundaries: list[float]) -> float:
    """E (X - Q(X))^2, in closed form."""
    total = 0.0
    for c, (a, b) in zip(levels, cells(boundaries), strict=True):
        mass, first, second = moments(a, b)
        total += second - 2 * c * first + c * c * mass
    return total


@pytest.mark.parametrize(("bits", "distance"), [(3, 0.0016), (4, 0.0065)])
def test_levels_are_lloyd_max(bits: int, distance: float) -> None:
    centroids = CODEBOOKS[bits].centroids
    best = lloyd_max(bits)
    assert max(abs(a - b) for a, b in zip(centroids, best, strict=True)) <= distance


@pytest.mark.parametrize(
    ("bits", "optimum", "ours"), [(3, 0.034548, 0.034549), (4, 0.009501, 0.009516)]
)
def test_mean_squared_error_is_as_stated(
    bits: int, optimum: float, ours: float
) -> None:
    best = lloyd_max(bits)
    middles = [(a + b) / 2 for a, b in pairwise(best)]
    assert mean_squared_error(best, middles) == pytest.approx(optimum, abs=6e-7)
    book = CODEBOOKS[bits]
    error = mean_squared_error(list(book.centroids), list(book.boundaries))
    assert error == pytest.approx(ours, abs=6e-7)


@pytest.mark.parametrize("bits", CODEBOOKS)
def test_levels_fit_the_integer_product(bits: int) -> None:
    """Ascending, symmetric, int8, and never -128, whose negation overflows."""
    book = CODEBOOKS[bits]
    assert len(book.levels) == 2**bits == len(book.boundaries) + 1
    assert list(book.levels) == sorted(set(book.levels))
    assert [-x for x in reversed(book.levels)] == list(book.levels)
    assert max(book.levels) <= 127
    assert list(book.boundaries) == sorted(book.boundaries)
