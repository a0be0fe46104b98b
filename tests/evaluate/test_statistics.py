# SPDX-License-Identifier: Apache-2.0
"""Intervals, against values from tables and computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.evaluate.statistics import (
    Interval,
    bootstrap_mean,
    mcnemar_p,
    paired_difference,
    paired_proportions,
    student_t_quantile,
    wilson,
)


def test_wilson_by_hand() -> None:
    # z^2/n = 3.8415/10; centre (0.8 + 0.19207)/1.38415; half
    # sqrt(0.16*0.38415 + 0.38415^2/4)/1.38415.
    found = wilson(8, 10)
    assert (found.value, found.low, found.high) == pytest.approx(
        (0.8, 0.49016, 0.94331), abs=1e-5
    )


def test_wilson_has_a_width_at_both_ends() -> None:
    assert wilson(0, 20) == Interval(0.0, 0.0, pytest.approx(0.16113, abs=1e-5))
    assert wilson(20, 20) == Interval(1.0, pytest.approx(0.83887, abs=1e-5), 1.0)


@pytest.mark.parametrize("counts", [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_impossible_counts(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="items"):
        wilson(*counts)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_lies_around_its_value_and_mirrors(counts: tuple[int, int]) -> None:
    successes, total = counts
    found, mirrored = wilson(successes, total), wilson(total - successes, total)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low == pytest.approx(1 - mirrored.high, abs=1e-12)


@pytest.mark.parametrize(
    ("degrees", "table"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (30, 2.0423), (500, 1.9647)],
)
def test_student_t_as_in_the_table(degrees: int, table: float) -> None:
    assert student_t_quantile(0.975, degrees) == pytest.approx(table, abs=6e-5)


def test_bootstrap_is_seeded() -> None:
    values = [n**1.7 for n in range(30)]
    assert bootstrap_mean(values, 7) == bootstrap_mean(values, 7)
    assert bootstrap_mean(values, 7) != bootstrap_mean(values, 8)
    assert bootstrap_mean([1.0, 4.0, 2.0, 8.0, 5.0], 7).value == 4.0


def test_bootstrap_of_many_values_is_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    found = bootstrap_mean(values.tolist(), 1)
    half = 1.96 * values.std(ddof=1) / math.sqrt(400)
    # 10,000 resamples place a 2.5 % quantile to 0.027 standard errors (one sigma).
    assert found.high - found.value == pytest.approx(half, rel=0.06)
    assert found.value - found.low == pytest.approx(half, rel=0.06)


def test_bootstrap_of_few_values_covers_as_it_says() -> None:
    """The plain percentiles cover 90 % at ten values; the expanded ones 95 %."""
    generator = np.random.default_rng(5)
    samples = generator.normal(size=(400, 10))
    hits = sum(
        bootstrap_mean(row.tolist(), 0, resamples=1000).contains(0.0) for row in samples
    )
    assert 0.925 < hits / 400 < 0.975  # +- 2.3 standard errors


def test_bootstrap_of_one_value_has_no_bounds() -> None:
    found = bootstrap_mean([2.5], 0)
    assert found.value == 2.5 and math.isnan(found.low) and math.isnan(found.high)
    assert found.as_dict() == {"value": 2.5, "low": None, "high": None}


def test_bootstrap_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([], 0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.integers(0, 9))
def test_bootstrap_stays_within_the_values(values: list[float], seed: int) -> None:
    found = bootstrap_mean(values, seed, resamples=200)
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack


def test_many_values_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polykv_vllm.evaluate.statistics._DRAWS_AT_ONCE", 25)
    found = bootstrap_mean([0.0, 1.0] * 5, 3, resamples=101)
    assert found.low < 0.5 < found.high


def test_a_paired_difference_ignores_what_items_share() -> None:
    reference = [float(10 * n) for n in range(20)]
    values = [r + 1.0 for r in reference]
    assert paired_difference(values, reference, 0) == Interval(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 2.0], 0)


def test_paired_proportions_by_hand() -> None:
    """36 both, 12 only the arm, 2 only the reference, none neither.

    Wilson: 48/50 -> (0.86538, 0.98896), 38/50 -> (0.62589, 0.85699). The product
    36*0 - 12*2 is negative, so phi = -24/sqrt(48*2*38*12) = -0.11471.
    """
    pairs = [(1, 1)] * 36 + [(1, 0)] * 12 + [(0, 1)] * 2
    found = paired_proportions([a for a, _ in pairs], [b for _, b in pairs])
    low1, up1, low2, up2, phi = 0.86538, 0.98896, 0.62589, 0.85699, -0.11471
    below = math.sqrt(
        (0.96 - low1) ** 2 - 2 * phi * (0.96 - low1) * (up2 - 0.76) + (up2 - 0.76) ** 2
    )
    above = math.sqrt(
        (up1 - 0.96) ** 2 - 2 * phi * (up1 - 0.96) * (0.76 - low2) + (0.76 - low2) ** 2
    )
    assert found.difference.value == pytest.approx(0.2)
    assert found.difference.low == pytest.approx(0.2 - below, abs=1e-4)
    assert found.difference.high == pytest.approx(0.2 + above, abs=1e-4)
    assert (found.gained, found.lost) == (12, 2)
    # 2 * (1 + 14 + 91) / 2^14
    assert found.p_value == pytest.approx(212 / 16384)


def test_equal_arms_have_an_interval_with_a_width() -> None:
    found = paired_proportions([True] * 20, [True] * 20)
    assert found.difference.value == 0.0
    assert found.difference.low == pytest.approx(-0.16113, abs=1e-5)
    assert found.difference.high == pytest.approx(0.16113, abs=1e-5)
    assert found.p_value == 1.0


def test_agreement_narrows_the_interval() -> None:
    """Ten of twenty each: the same ten say more than ten others."""
    half = [True] * 10 + [False] * 10
    same = paired_proportions(half, half).difference
    other = paired_proportions(half, half[::-1]).difference
    assert same.high < 0.1 < 0.3 < other.high


def test_mcnemar_by_hand() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(5, 0) == pytest.approx(2 / 32)
    assert mcnemar_p(1, 5) == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar_p(3, 3) == 1.0


PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(PAIRS)
def test_swapping_the_arms_mirrors_the_difference(pairs: list) -> None:
    left, right = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired_proportions(left, right), paired_proportions(right, left)
    assert there.difference.low == pytest.approx(-back.difference.high, abs=1e-12)
    assert there.difference.contains(there.difference.value)
    assert there.p_value == back.p_value
