# SPDX-License-Identifier: Apache-2.0
"""How much of an answer a compressed cache leaves as it was, and whether it loops.

Agreement compares an arm's answer with the reference arm's answer to the same prompt.
It measures change, not quality: greedy text parts at the first close call, and then
all of it may differ. Read it beside the perplexity.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from polykv_vllm.evaluate.engine import Generation
from polykv_vllm.evaluate.errors import EvalError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
NGRAM = 4
_LOOP_ROUNDS = 3  # "ha ha" is speech, a third time is a loop


@dataclass(frozen=True)
class Agreement:
    """Of one answer with the reference's.

    Attributes:
        exact: The texts are the same but for blanks around them.
        token_f1: Harmonic mean of word precision and recall, 0..1.
        chrf: chrF2 of sacrebleu, 0..100.
        first_difference: Generated tokens that are the same before the first one that
            is not; None if all are.
        length_ratio: Generated tokens over the reference's.

    """

    exact: bool
    token_f1: float
    chrf: float
    first_difference: int | None
    length_ratio: float


def agreement(answer: Generation, reference: Generation) -> Agreement:
    """Compare an answer with the reference arm's answer to the same prompt.

    Raises:
        EvalError: sacrebleu is not installed.

    """
    return Agreement(
        exact=answer.text.strip() == reference.text.strip(),
        token_f1=token_f1(answer.text, reference.text),
        chrf=chrf(answer.text, reference.text),
        first_difference=first_difference(answer.token_ids, reference.token_ids),
        length_ratio=len(answer.token_ids) / max(len(reference.token_ids), 1),
    )


def normalized_words(text: str) -> list[str]:
    """Return the words that SQuAD compares (Rajpurkar et al. 2016, section 6.1).

    Lower case, without ASCII punctuation and English articles.
    """
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(answer: str, reference: str) -> float:
    """Return the F1 of the bags of normalised words; two empty answers agree."""
    words, expected = normalized_words(answer), normalized_words(reference)
    if not words or not expected:
        return float(words == expected)
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected))


def chrf(answer: str, reference: str) -> float:
    """Return chrF2 (Popović 2015), 0..100; two empty answers agree.

    Raises:
        EvalError: sacrebleu is not installed.

    """
    if not answer.strip() or not reference.strip():
        return 100.0 if answer.strip() == reference.strip() else 0.0
    return float(chrf_metric().sentence_score(answer, [reference]).score)


@cache
def chrf_metric() -> Any:
    """Return sacrebleu's scorer; call it early, to fail before an engine starts.

    Raises:
        EvalError: sacrebleu is not installed.

    """
    try:
        from sacrebleu.metrics import CHRF
    except ImportError as error:
        raise EvalError(
            "the agreement of answers needs sacrebleu: pip install 'polykv-vllm[eval]'"
        ) from error
    return CHRF()


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the first position where two answers differ, or one has ended."""
    if tuple(tokens) == tuple(reference):
        return None
    for position, (ours, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if ours != theirs:
            return position
    return min(len(tokens), len(reference))


@dataclass(frozen=True)
class Repetition:
    """Signs of a model that is stuck.

    Attributes:
        tokens: Generated.
        repeated_share: Share of the 4-grams of tokens that occurred before.
        loop_tokens: Longest stretch in which one pattern comes three times or more in
            a row.
        hit_limit: The answer was cut at the length limit.

    """

    tokens: int
    repeated_share: float
    loop_tokens: int
    hit_limit: bool

    @property
    def is_stuck(self) -> bool:
        """Whether the answer ran into the limit and at least half of it is a loop."""
        return self.hit_limit and 2 * self.loop_tokens >= self.tokens > 0


def repetition(answer: Generation) -> Repetition:
    """Look for loops in an answer."""
    return Repetition(
        tokens=len(answer.token_ids),
        repeated_share=repeated_share(answer.token_ids),
        loop_tokens=loop_tokens(answer.token_ids),
        hit_limit=answer.finish_reason == "length",
    )


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Return the share of n-grams that occurred before, 0 where there are none."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loop_tokens(tokens: Sequence[int]) -> int:
    """Return the length of the longest loop: a pattern three or more times in a row.

    A pattern of p tokens repeats where a token equals the one p before it; a run of r
    such places is a stretch of r + p tokens.
    """
    sequence = np.asarray(tokens, dtype=np.int64)
    longest = 0
    for period in range(1, len(sequence) // _LOOP_ROUNDS + 1):
        run = _longest_run(sequence[period:] == sequence[:-period])
        if run >= (_LOOP_ROUNDS - 1) * period:
            longest = max(longest, run + period)
    return longest


def _longest_run(flags: np.ndarray[Any, Any]) -> int:
    """Return the length of the longest run of True."""
    ends = np.flatnonzero(np.concatenate(([True], ~flags, [True])))
    return int(np.diff(ends).max()) - 1


def summarize_repetition(answers: Sequence[Repetition]) -> dict[str, Any]:
    """Return means over the answers, and how many were cut or stuck, for a JSON file.

    Raises:
        ValueError: There are no answers.

    """
    if not answers:
        raise ValueError("no answers to summarize")
    count = len(answers)
    return {
        "answers": count,
        "mean_tokens": sum(a.tokens for a in answers) / count,
        "repeated_share": sum(a.repeated_share for a in answers) / count,
        "longest_loop_tokens": max(a.loop_tokens for a in answers),
        "hit_limit": sum(a.hit_limit for a in answers),
        "stuck": sum(a.is_stuck for a in answers),
    }
