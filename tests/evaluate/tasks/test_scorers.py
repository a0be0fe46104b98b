# SPDX-License-Identifier: Apache-2.0
"""What counts as a right answer."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.evaluate.tasks.scorers import (
    contains,
    exact,
    final_number,
    marked_number,
    number,
)


@pytest.mark.parametrize(
    ("answer", "right"), [(" Paris\n", True), ("PARIS", True), ("Paris.", False)]
)
def test_exact(answer: str, right: bool) -> None:
    assert exact(answer, ["Rome", "Paris"]) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is 42.", True),
        (" <42>", True),
        ('"42"', True),
        ("42, I think", True),
        ("1423", False),
        ("42nd", False),
        ("4.42", False),
        ("42.5", False),
        ("42,000", False),
        ("7,42", False),
        ("x42", False),
        ("_42_", True),
        ("", False),
    ],
)
def test_contains_takes_whole_words(answer: str, right: bool) -> None:
    assert contains(answer, ["42"]) is right


def test_contains_knows_any_of_several_in_any_case() -> None:
    assert contains("in the CITY of Röntgen", ["none", "röntgen"])
    assert not contains("anything", [" "])
    assert contains("a c++ (x) b", ["c++ (x)"])  # nothing is a pattern


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 + 4 = 7", "7"),
        ("#### 18", "18"),
        ("9 * 2 = 18\n#### $1,234.50 and 3 more", "1234.50"),
        ("#### -5", "-5"),
        ("18.", "18"),
        ("it is .5", "0.5"),
        ("1,2,3", "123"),  # as a calculator reads it
        ("none", None),
        ("7\n#### none", None),  # the mark says where the answer is
    ],
)
def test_final_number(text: str, value: str | None) -> None:
    assert final_number(text) == (None if value is None else Decimal(value))


def test_number_compares_values() -> None:
    assert number("that makes $18.00", ["18"])
    assert number("#### 18\n\nQuestion: 5", ["#### 18"])
    assert not number("18 or 19", ["18"])
    assert not number("no idea", ["18"])


def test_a_marked_number_needs_the_mark() -> None:
    assert marked_number("9 * 2 = 18\n#### 18", ["18"])
    assert not marked_number("The answer is 18", ["18"])
    assert not marked_number("18 ####", ["18"])


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc \n", max_size=20))
def test_a_number_is_found_in_any_words(value: int, words: str) -> None:
    assert number(f"{words} {value:,} {words}", [str(value)])
    assert contains(f"{words} {value} {words}", [str(value)])
    assert not contains(f"{words}{value}1{words}", [str(value)])
