# SPDX-License-Identifier: Apache-2.0
"""One record of many is asked for: JSON keys, lines, RULER's keys."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.tasks.items import Draft
from polykv_vllm.evaluate.tasks.jsonl import Line, data_file, read_lines
from polykv_vllm.evaluate.tasks.prompts import PromptEncoder
from polykv_vllm.evaluate.tasks.suite import TaskSuite

KV_FILE = "litm_kv_retrieval_75keys_first60.jsonl"
LINES_FILE = "longeval_lines_200.jsonl"
RULER_FILE = "ruler_4096_niah_multikey3_first60.jsonl"

_LINE = re.compile(r"^line (?P<name>\S+): REGISTER_CONTENT is <\d+>$")
_QUESTION_END = "?"

T = TypeVar("T")


def window(records: Sequence[T], kept: int, gold: int, draw: random.Random) -> list[T]:
    """Return `kept` consecutive records, `gold` among them, at a random place.

    All records where there are no more than `kept`.
    """
    last = max(len(records) - kept, 0)
    start = draw.randint(max(gold - kept + 1, 0), min(gold, last)) if last else 0
    return list(records[start : start + kept])


class KeyValueSuite(TaskSuite):
    """A value of a JSON object of UUIDs (Liu et al. 2023, arXiv 2307.03172)."""

    name: ClassVar[str] = "kv_retrieval"
    answer_tokens: ClassVar[int] = 48  # a UUID takes up to 36
    scores_answer: ClassVar[bool] = True

    def check(self) -> None:
        """See the base class; there must be a key to tell from others."""
        super().check()
        if self.options.kv_keys < 2:
            raise EvalError(
                f"kv_retrieval: at least 2 keys, not {self.options.kv_keys}"
            )

    def files(self) -> list[Path]:
        """Return the file with the objects."""
        return [data_file(self.options.data, KV_FILE, self.name)]

    def task_settings(self) -> dict[str, Any]:
        """Return the number of keys."""
        return {"kv_keys": self.options.kv_keys}

    def drafts(self, encoder: PromptEncoder) -> Iterator[Draft]:
        """Yield a question for each line."""
        for line in read_lines(self.files()[0]):
            key, value = line.text("key"), line.text("value")
            pairs = _pairs(line)
            gold = next((n for n, pair in enumerate(pairs) if pair[0] == key), None)
            if gold is None:
                raise line.error(f"key {key!r} is not in 'ordered_kv_records'")
            draw = random.Random(f"kv {self.options.seed} {line.number}")
            kept = window(pairs, self.options.kv_keys, gold, draw)
            table = json.dumps(dict(kept), indent=0)
            yield Draft(
                id=f"{self.options.kv_keys}-{line.number:04d}",
                user=(
                    "This JSON object maps keys to values.\n\n"
                    f'{table}\n\nWhich value belongs to the key "{key}"?'
                ),
                accepted=(value,),
                assistant=f'The value of "{key}" is',
                answer=f' "{value}"',
            )


def _pairs(line: Line) -> list[tuple[str, str]]:
    pairs = line.get("ordered_kv_records", list)
    if not all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(p, str) for p in pair)
        for pair in pairs
    ):
        raise line.error("'ordered_kv_records' is no list of pairs of strings")
    return [(key, value) for key, value in pairs]


class LinesSuite(TaskSuite):
    """The number of a named line (LongEval, lmsys.org/blog/2023-06-29-longchat)."""

    name: ClassVar[str] = "lines"
    answer_tokens: ClassVar[int] = 16
    scores_answer: ClassVar[bool] = True

    def check(self) -> None:
        """See the base class; there must be a line to tell from others."""
        super().check()
        if self.options.lines < 2:
            raise EvalError(f"lines: at least 2 lines, not {self.options.lines}")

    def files(self) -> list[Path]:
        """Return the file with the records."""
        return [data_file(self.options.data, LINES_FILE, self.name)]

    def task_settings(self) -> dict[str, Any]:
        """Return the number of lines."""
        return {"lines": self.options.lines}

    def drafts(self, encoder: PromptEncoder) -> Iterator[Draft]:
        """Yield a question for each line of the file."""
        for line in read_lines(self.files()[0]):
            rows = line.text("prompt").split("\n")
            numbers = [n for n, row in enumerate(rows) if _LINE.match(row)]
            wanted = line.text("correct_line").strip()
            gold = next((i for i, n in enumerate(numbers) if rows[n] == wanted), None)
            if gold is None:
                raise line.error("'correct_line' is not a line of 'prompt'")
            name = wanted.split(":")[0]
            draw = random.Random(f"lines {self.options.seed} {line.number}")
            kept = window([rows[n] for n in numbers], self.options.lines, gold, draw)
            head = "\n".join(rows[: numbers[0]])
            tail = "\n".join(rows[numbers[-1] + 1 :]).strip()
            (expected,) = line.texts("expected_number")
            yield Draft(
                id=f"{self.options.lines}-{line.number:04d}",
                user="\n".join([head, *kept, "", tail]),
                accepted=(expected,),
                assistant=f"The <REGISTER_CONTENT> in {name} is",
                answer=f" <{expected}>",
            )


class RulerSuite(TaskSuite):
    """RULER's multi-key needles (Hsieh et al. 2024, arXiv 2404.06654): all keys."""

    name: ClassVar[str] = "ruler"
    answer_tokens: ClassVar[int] = 48
    scores_answer: ClassVar[bool] = True

    def files(self) -> list[Path]:
        """Return the file with the prompts."""
        return [data_file(self.options.data, RULER_FILE, self.name)]

    def drafts(self, encoder: PromptEncoder) -> Iterator[Draft]:
        """Yield the prompts as they are; the answer's beginning is part of them."""
        for line in read_lines(self.files()[0]):
            user, mark, assistant = line.text("input").rpartition(_QUESTION_END)
            if not mark:
                raise line.error("'input' has no question")
            accepted = line.texts("outputs")
            yield Draft(
                id=f"{line.number:04d}",
                user=user + mark,
                accepted=accepted,
                assistant=assistant.strip(),
                answer=f" {accepted[0]}",
            )
