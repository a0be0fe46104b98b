# SPDX-License-Identifier: Apache-2.0
"""Agreement and repetition, against values computed by hand."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.evaluate import answers
from polykv_vllm.evaluate.answers import (
    Repetition,
    agreement,
    chrf,
    first_difference,
    loop_tokens,
    normalized_words,
    repeated_share,
    repetition,
    summarize_repetition,
    token_f1,
)
from polykv_vllm.evaluate.engine import Generation
from polykv_vllm.evaluate.errors import EvalError


def generation(tokens: list[int], text: str = "", finish: str = "stop") -> Generation:
    return Generation(tuple(tokens), text, 0, finish)


def test_words_are_those_of_squad() -> None:
    assert normalized_words("The cat's on an  Apple-tree!") == [
        "cats",
        "on",
        "appletree",
    ]
    assert normalized_words("Theatre, another") == ["theatre", "another"]


def test_token_f1_by_hand() -> None:
    # Common: cat, sat, and one of two "down": 3; 4 and 5 words.
    assert token_f1("cat sat down low", "The cat sat down, down there") == 2 * 3 / 9
    assert token_f1("The Paris.", "paris") == 1.0
    assert token_f1("", "the") == 1.0  # nothing is left of either
    assert token_f1("Paris", "") == 0.0


def test_chrf_by_hand() -> None:
    """One reference, "abc" against "abd": orders 1, 2 and 3 exist.

    Precision and recall are 2/3, 1/2, 0, their means 7/18, and so is F.
    """
    pytest.importorskip("sacrebleu")
    assert chrf("abc", "abd") == pytest.approx(100 * 7 / 18)
    assert chrf("same words", "same words") == pytest.approx(100.0)
    assert (chrf("", " "), chrf("", "words")) == (100.0, 0.0)


def test_chrf_without_sacrebleu_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    answers.chrf_metric.cache_clear()
    with pytest.raises(EvalError, match=r"polykv-vllm\[eval\]"):
        chrf("abc", "abd")
    answers.chrf_metric.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "reference", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 9, 3], [1, 2, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [1], 0),
        ([], [], None),
    ],
)
def test_first_difference(
    tokens: list[int], reference: list[int], position: int | None
) -> None:
    assert first_difference(tokens, reference) == position


def test_agreement_of_two_answers() -> None:
    pytest.importorskip("sacrebleu")
    found = agreement(generation([5, 6, 7], " in Paris "), generation([5, 8], "Paris"))
    assert (found.exact, found.first_difference, found.length_ratio) == (False, 1, 1.5)
    assert found.token_f1 == pytest.approx(2 / 3)
    assert agreement(generation([5], " Paris"), generation([5], "Paris ")).exact


def test_repeated_share_by_hand() -> None:
    # 1234 2341 3412 4123 1234: the fifth is the first again.
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share([7] * 10) == pytest.approx(6 / 7)
    assert repeated_share([1, 2, 3]) == 0.0


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ([], 0),
        ([1, 1], 0),  # twice is no loop
        ([1, 1, 1], 3),
        ([9, 1, 2, 1, 2, 1, 2, 1, 8], 7),  # three rounds and a half
        ([1, 2, 3, 1, 2, 3], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 0),
    ],
)
def test_loops(tokens: list[int], length: int) -> None:
    assert loop_tokens(tokens) == length


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(3, 8),
    st.lists(st.integers(4, 60), unique=True, max_size=8),
)
def test_a_pattern_is_found_wherever_it_stands(
    pattern: list[int], rounds: int, around: list[int]
) -> None:
    half = len(around) // 2
    tokens = around[:half] + pattern * rounds + around[half:]
    assert loop_tokens(tokens) == len(pattern) * rounds


def test_a_stuck_model_is_told_from_a_long_answer() -> None:
    looping = repetition(generation([1, 2, 3] + [4, 5] * 20, finish="length"))
    assert looping == Repetition(43, pytest.approx(35 / 40), 40, True)
    assert looping.is_stuck
    assert not repetition(generation(list(range(50)), finish="length")).is_stuck
    assert not repetition(generation([4, 5] * 20, finish="stop")).is_stuck
    summary = summarize_repetition([looping, Repetition(7, 0.0, 0, False)])
    assert (summary["stuck"], summary["hit_limit"], summary["answers"]) == (1, 1, 2)
    assert summary["mean_tokens"] == 25 and summary["longest_loop_tokens"] == 40


def test_no_answers_have_no_summary() -> None:
    with pytest.raises(ValueError, match="no answers"):
        summarize_repetition([])
