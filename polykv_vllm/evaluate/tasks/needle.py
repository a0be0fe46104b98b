# SPDX-License-Identifier: Apache-2.0
"""A number hidden in prose, at several depths."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.tasks.items import Draft
from polykv_vllm.evaluate.tasks.jsonl import data_file, read_lines
from polykv_vllm.evaluate.tasks.prompts import PromptEncoder
from polykv_vllm.evaluate.tasks.suite import TaskSuite

PASSAGES = "litm_nq_open_oracle_first400.jsonl"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_NEEDLE = "The secret number of the archive is {}."
_QUESTION = "What is the secret number of the archive? Answer with the number."
_ANSWER = "The secret number of the archive is"
_MIN_TOKENS = 64


class NeedleSuite(TaskSuite):
    """Each item has passages, a number and, in turn, a depth of its own."""

    name: ClassVar[str] = "needle"
    answer_tokens: ClassVar[int] = 16

    def check(self) -> None:
        """See the base class; length and depths must make sense."""
        super().check()
        if self.options.needle_tokens < _MIN_TOKENS:
            raise EvalError(
                f"needle: a text of {self.options.needle_tokens} tokens hides nothing; "
                f"at least {_MIN_TOKENS}"
            )
        depths = self.options.needle_depths
        if not depths or not all(0 <= depth <= 1 for depth in depths):
            raise EvalError(f"needle: depths lie between 0 and 1, not {depths}")

    def files(self) -> list[Path]:
        """Return the file with the text."""
        return [
            self.options.haystack or data_file(self.options.data, PASSAGES, self.name)
        ]

    def task_settings(self) -> dict[str, Any]:
        """Return length and depths."""
        return {
            "needle_tokens": self.options.needle_tokens,
            "needle_depths": list(self.options.needle_depths),
        }

    def drafts(self, encoder: PromptEncoder) -> Iterator[Draft]:
        """Yield items without end.

        Raises:
            EvalError: The text is too short.

        """
        haystack = Haystack(read_passages(self.files()[0]), encoder)
        wanted, depths = self.options.needle_tokens, self.options.needle_depths
        if haystack.tokens < wanted:
            raise EvalError(
                f"needle: {self.files()[0]} has {haystack.tokens} tokens; "
                f"a text of {wanted} was asked for"
            )
        # More items than this would only be more draws from the same text.
        for index in range(10 * self.options.items):
            draw = random.Random(f"needle {self.options.seed} {index}")
            depth = depths[index % len(depths)]
            number = str(draw.randint(100_000, 999_999))
            text = haystack.hide(_NEEDLE.format(number), wanted, depth, draw)
            yield Draft(
                id=f"{wanted}-d{round(100 * depth):03d}-{index:04d}",
                user=f"Read this text.\n\n{text}\n\n{_QUESTION}",
                accepted=(number,),
                assistant=_ANSWER,
                group=f"depth {round(100 * depth):3d} %",
            )


def read_passages(path: Path) -> list[str]:
    """Return the passages (`ctxs[].text`) of JSON lines, the paragraphs of other files.

    Raises:
        EvalError: The file is malformed or empty.

    """
    if path.suffix != ".jsonl":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EvalError(f"cannot read {path}: {error}") from error
        passages = [" ".join(part.split()) for part in text.split("\n")]
    else:
        passages = []
        for line in read_lines(path):
            for passage in line.get("ctxs", list):
                if not isinstance(passage, dict) or "text" not in passage:
                    raise line.error("an entry of 'ctxs' has no field 'text'")
                passages.append(" ".join(str(passage["text"]).split()))
    passages = [passage for passage in passages if passage]
    if not passages:
        raise EvalError(f"{path} has no text")
    return passages


class Haystack:
    """Passages that texts of a given length are drawn from.

    Args:
        passages: Each without line breaks.
        encoder: Counts tokens.

    """

    def __init__(self, passages: Sequence[str], encoder: PromptEncoder) -> None:
        split = [_SENTENCE_END.split(passage) for passage in passages]
        counts = iter(encoder.count([one for sentences in split for one in sentences]))
        self._passages = [
            [(one, next(counts)) for one in sentences] for sentences in split
        ]
        self.tokens = sum(n for passage in self._passages for _, n in passage)

    def hide(self, needle: str, wanted: int, depth: float, draw: random.Random) -> str:
        """Return passages in random order with `needle` between two sentences.

        Args:
            needle: A sentence.
            wanted: Tokens of the text without it; the last sentence may go beyond.
            depth: Share of the tokens before it, to the nearest sentence.
            draw: Chooses the passages.

        """
        parts: list[str] = []
        starts = [0]  # tokens before each part, and before what follows the last
        for passage in draw.sample(self._passages, len(self._passages)):
            for number, (sentence, tokens) in enumerate(passage):
                if starts[-1] >= wanted:
                    break
                parts.append(sentence if number else f"\n\n{sentence}")
                starts.append(starts[-1] + tokens)
        aim = depth * starts[-1]
        place = min(range(len(starts)), key=lambda n: abs(starts[n] - aim))
        parts.insert(place, needle)
        return " ".join(parts).replace(" \n\n", "\n\n").strip()
