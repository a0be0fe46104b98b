# SPDX-License-Identifier: Apache-2.0
"""When an answer counts as right."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

Match = Callable[[str, Sequence[str]], bool]
"""Called with the answer and the accepted ones."""

FINAL_ANSWER = "####"
"""GSM8K's mark: what follows is the result."""

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")


def exact(answer: str, accepted: Sequence[str]) -> bool:
    """Say whether the answer is an accepted one, blanks around it and case aside."""
    return answer.strip().casefold() in {a.strip().casefold() for a in accepted}


def contains(answer: str, accepted: Sequence[str]) -> bool:
    """Say whether an accepted answer stands in the text as a whole word, in any case.

    `42` does not stand in `1423`, nor in `4.42`.
    """
    return any(
        re.search(
            rf"(?<![^\W_])(?<!\d[.,]){re.escape(a.strip())}(?![^\W_])(?![.,]\d)",
            answer,
            re.IGNORECASE,
        )
        for a in accepted
        if a.strip()
    )


def number(answer: str, accepted: Sequence[str]) -> bool:
    """Say whether the number that an answer arrives at is an accepted one.

    That is the first one after `####`, and without the mark the last one. Signs of
    money and commas between thousands are passed over; 18.0 is 18.
    """
    found = final_number(answer)
    return found is not None and found in {final_number(a) for a in accepted}


def marked_number(answer: str, accepted: Sequence[str]) -> bool:
    """Say whether the number after `####` is an accepted one; no mark, no answer."""
    return FINAL_ANSWER in answer and number(answer, accepted)


def final_number(text: str) -> Decimal | None:
    """Return the number that a text arrives at; None if it has none."""
    _, mark, after = text.partition(FINAL_ANSWER)
    numbers = _NUMBER.findall(after if mark else text)
    if not numbers:
        return None
    try:
        return Decimal((numbers[0] if mark else numbers[-1]).replace(",", ""))
    except InvalidOperation:
        return None


MATCHES: dict[str, Match] = {"exact": exact, "contains": contains, "number": number}
"""The modes that a task file may choose."""
