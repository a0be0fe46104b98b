# SPDX-License-Identifier: Apache-2.0
"""Intervals for what an evaluation reports: seeded, two-sided, 95 % unless told.

Arms answer the same items, so their difference is taken item by item: what makes an
item hard for both drops out, and the interval is that of the difference, not of two
separate scores.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000
_DRAWS_AT_ONCE = 1 << 22  # bounds the memory of a bootstrap to some 64 MiB
_MANY = 1000  # degrees of freedom from which Student's t is the normal to 0.1 %


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval; the bounds are NaN where one value is all."""

    value: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Say whether `value` lies in the closed interval."""
        return self.low <= value <= self.high

    def map(self, function: Callable[[float], float]) -> "Interval":
        """Apply an increasing function to the estimate and both bounds."""
        return Interval(function(self.value), function(self.low), function(self.high))

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields for a JSON file, which knows no NaN."""
        fields = {"value": self.value, "low": self.low, "high": self.high}
        return {k: None if math.isnan(v) else v for k, v in fields.items()}


def wilson(successes: int, total: int, level: float = LEVEL) -> Interval:
    """Return a proportion with its score interval (Wilson 1927).

    Unlike value +- 1.96 standard errors it stays within 0..1 and has a width when
    all items or none succeeded.

    Args:
        successes: 0..total.
        total: Items scored.
        level: Coverage.

    Raises:
        ValueError: No items, or more successes than items.

    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"{successes} successes of {total} items")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = successes / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    # The bounds at 0 and 1 are exact; the square root leaves 1e-17 beside them.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return Interval(share, low, high)


def bootstrap_mean(
    values: Sequence[float],
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the mean of `values` with a percentile bootstrap interval.

    The percentiles are moved outward for few values, where the plain ones cover too
    little ("expanded percentile", Hesterberg 2015, arXiv 1411.5279, section 5.3). With
    fewer than about five values the interval is still no more than their range.

    Args:
        values: One per independent item (chunk, document, question).
        seed: Of the resampling; the same seed gives the same interval.
        level: Coverage.
        resamples: Number of means drawn.

    Raises:
        ValueError: There are no values.

    """
    data = np.asarray(values, dtype=np.float64)
    count = data.size
    if count == 0:
        raise ValueError("no values to take the mean of")
    mean = float(data.mean())
    if count == 1:
        return Interval(mean, math.nan, math.nan)
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWS_AT_ONCE // count)
    means = np.concatenate(
        [
            data[generator.integers(0, count, (min(rows, resamples - at), count))].mean(
                axis=1
            )
            for at in range(0, resamples, rows)
        ]
    )
    t = student_t_quantile((1 + level) / 2, min(count - 1, _MANY))
    tail = NormalDist().cdf(-t * math.sqrt(count / (count - 1)))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high))


def paired_difference(
    values: Sequence[float], reference: Sequence[float], seed: int, level: float = LEVEL
) -> Interval:
    """Return mean(values - reference) with a bootstrap interval over the items.

    Args:
        values: One per item.
        reference: Of the same items, in the same order.
        seed: Of the resampling.
        level: Coverage.

    Raises:
        ValueError: There are no items, or not the same number of them.

    """
    pairs = zip(values, reference, strict=True)
    return bootstrap_mean([a - b for a, b in pairs], seed, level)


@dataclass(frozen=True)
class PairedProportions:
    """Two arms' successes on the same items.

    Attributes:
        difference: Of the proportions, arm minus reference, with its interval.
        gained: Items that only the arm solved.
        lost: Items that only the reference solved.
        p_value: Exact McNemar test: the chance of so uneven a split if both arms
            were equally good.

    """

    difference: Interval
    gained: int
    lost: int
    p_value: float


def paired_proportions(
    successes: Sequence[bool], reference: Sequence[bool], level: float = LEVEL
) -> PairedProportions:
    """Compare two arms' successes item by item.

    The interval is Newcombe's (1998, Statistics in Medicine 17:2635, method 10): the
    Wilson intervals of both arms, joined with the correlation between them. It has a
    width when the arms agree on every item, where a bootstrap's has none.

    Args:
        successes: One per item.
        reference: Of the same items, in the same order.
        level: Coverage.

    Raises:
        ValueError: There are no items, or not the same number of them.

    """
    pairs = list(zip(map(bool, successes), map(bool, reference), strict=True))
    both, gained = pairs.count((True, True)), pairs.count((True, False))
    lost, neither = pairs.count((False, True)), pairs.count((False, False))
    arm = wilson(both + gained, len(pairs), level)
    base = wilson(both + lost, len(pairs), level)
    phi = _correlation(both, gained, lost, neither)
    value = arm.value - base.value
    below = _joint(arm.value - arm.low, base.high - base.value, phi)
    above = _joint(arm.high - arm.value, base.value - base.low, phi)
    difference = Interval(value, value - below, value + above)
    return PairedProportions(difference, gained, lost, mcnemar_p(gained, lost))


def _correlation(both: int, gained: int, lost: int, neither: int) -> float:
    """Return the phi coefficient of a two-by-two table, corrected for continuity."""
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    if margins == 0:
        return 0.0
    product: float = both * neither - gained * lost
    if product > 0:
        product = max(product - (both + gained + lost + neither) / 2, 0)
    return product / math.sqrt(margins)


def _joint(a: float, b: float, phi: float) -> float:
    return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))


def mcnemar_p(gained: int, lost: int) -> float:
    """Return the two-sided exact p value of a split of the items that differ."""
    total, fewer = gained + lost, min(gained, lost)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def student_t_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while _student_t_cdf(high, degrees) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _student_t_cdf(middle, degrees) < p:
            low = middle
        else:
            high = middle
    return high


def _student_t_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t), t >= 0: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    cos2 = math.cos(theta) ** 2
    odd = degrees % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    # Terms k/(k+1) apart in odd degrees from 2, in even ones from 1.
    for k in range(2 if odd else 1, degrees, 2):
        total += term
        term *= cos2 * k / (k + 1)
    inside = total * math.sin(theta)
    if odd:
        inside = 2 / math.pi * (theta + inside)
    return 0.5 + inside / 2
