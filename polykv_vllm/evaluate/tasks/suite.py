# SPDX-License-Identifier: Apache-2.0
"""What all tasks have in common: ask, score, keep every answer, compare by item."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from polykv_vllm.evaluate.answers import repetition
from polykv_vllm.evaluate.arms import Arm
from polykv_vllm.evaluate.engine import Engine, Generation, ScoreRequest, TokenScores
from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.options import SuiteOptions, TaskOptions
from polykv_vllm.evaluate.results import RunStore
from polykv_vllm.evaluate.suite import Demand, Progress, Records, SuiteReport
from polykv_vllm.evaluate.tasks.figures import task_figures
from polykv_vllm.evaluate.tasks.items import Draft, Item, ItemSet, batches, encode_items
from polykv_vllm.evaluate.tasks.prompts import PromptEncoder, Tokens, shared_prefix
from polykv_vllm.evaluate.tasks.report import task_report
from polykv_vllm.evaluate.tasks.scorers import Match, contains

MIN_SHARED_TOKENS = 128
"""A shorter common beginning is the chat template's, and below a block of vLLM's."""

_ANSWER_CHARACTERS = 400  # of an answer are kept in the record


class TaskSuite:
    """Base of the tasks: a subclass says what is asked and what counts.

    Args:
        options: Of all tasks.

    """

    name: ClassVar[str]
    answer_tokens: ClassVar[int]
    stop: ClassVar[tuple[str, ...]] = ()
    scores_answer: ClassVar[bool] = False
    """Whether the likelihood of the expected answer is a second score."""

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        self.longest_answer = options.answer_tokens or self.answer_tokens
        self.found = ItemSet(options.items)
        self.prefix: Tokens = ()

    @classmethod
    def from_options(cls, options: SuiteOptions) -> Self:
        """Take the task's options; its files must be there.

        Raises:
            EvalError: A file is missing, an option makes no sense.

        """
        tasks = options.tasks
        for name in ("items", "batch", "answer_tokens"):
            value = getattr(tasks, name)
            if value is not None and value < 1:
                raise EvalError(f"{cls.name}: {name} must be at least 1, not {value}")
        suite = cls(tasks)
        suite.check()
        return suite

    def check(self) -> None:
        """Look at the options before anything is loaded.

        Raises:
            EvalError: As `from_options`.

        """
        for path in self.files():
            if not path.is_file():
                raise EvalError(f"{self.name}: there is no file {path}")

    def files(self) -> list[Path]:
        """Return the files that the task reads."""
        raise NotImplementedError

    def drafts(self, encoder: PromptEncoder) -> Iterator[Draft]:
        """Yield items in order, the same in every run."""
        raise NotImplementedError

    def task_settings(self) -> dict[str, Any]:
        """Return the options that are the task's own."""
        return {}

    def match(self) -> Match:
        """Return the function that says whether an answer counts."""
        return contains

    def prepare(self, tokenizer: Any, context_tokens: int) -> Demand:
        """Tokenise the items.

        Raises:
            EvalError: A line is malformed, or no item fits the model.

        """
        encoder = PromptEncoder(tokenizer)
        self.found = encode_items(
            self.drafts(encoder),
            encoder,
            self.options.items,
            context_tokens,
            self.longest_answer,
        )
        items = self.found.items
        if not items:
            raise EvalError(
                f"{self.name}: none of {len(self.found.too_long)} items fits the "
                f"model's context of {context_tokens} tokens"
            )
        prefix = shared_prefix([item.prompt for item in items])
        self.prefix = prefix if len(prefix) >= MIN_SHARED_TOKENS else ()
        return self._demand()

    def _demand(self) -> Demand:
        sizes = [
            len(item.prompt) + max(self.longest_answer, len(item.answer))
            for item in self.found.items
        ]
        live = max(
            sum(len(i.prompt) + max(self.longest_answer, len(i.answer)) for i in batch)
            for batch in self._batches(self.found.items)
        )
        most = max(len(batch) for batch in self._batches(self.found.items))
        return Demand(max(sizes), live + len(self.prefix), most)

    def _batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        return batches(items, self.options.batch, self.longest_answer)

    def settings(self) -> dict[str, Any]:
        """Return what makes two records comparable."""
        return {
            "items": self.options.items,
            "seed": self.options.seed,
            "batch": self.options.batch,
            "answer_tokens": self.longest_answer,
            "match": self.match().__name__,
            "files": {path.name: digest(path) for path in self.files()},
            "item_ids": [item.id for item in self.found.items],
            **self.task_settings(),
        }

    def run(
        self, engine: Engine, arm: Arm, store: RunStore, progress: Progress
    ) -> dict[str, Any]:
        """Ask all items that have no answer yet; return scores and answers."""
        log = store.items(arm.name, self.name)
        pending = [item for item in self.found.items if item.id not in log.done]
        total = len(self.found.items)
        progress(total - len(pending), total)
        if pending:
            engine.reset_prefix_cache()
            if self.prefix:  # once, where a first batch would compute it in parallel
                engine.generate([self.prefix], 1)
        for batch in self._batches(pending):
            for item, record in zip(batch, self._ask(engine, batch), strict=True):
                log.add(item.id, record)
            progress(len(log.done), total)
        return task_figures(self.found, log.done, len(self.prefix), self.options.seed)

    def _ask(self, engine: Engine, batch: Sequence[Item]) -> list[dict[str, Any]]:
        """Return the records of a batch.

        Scored first: that reads no cache but fills it, so that the answers find their
        prompts there.
        """
        started = time.monotonic()
        scores: list[TokenScores | None] = [None] * len(batch)
        if self.scores_answer:
            scores = list(engine.score([self._request(item) for item in batch]))
        answers = engine.generate(
            [item.prompt for item in batch], self.longest_answer, self.stop
        )
        seconds = (time.monotonic() - started) / len(batch)
        return [
            self._record(item, answer, score) | {"seconds": round(seconds, 3)}
            for item, answer, score in zip(batch, answers, scores, strict=True)
        ]

    def _request(self, item: Item) -> ScoreRequest:
        tokens = item.prompt + item.answer
        return ScoreRequest(f"{self.name}-{item.id}", tokens, len(item.prompt))

    def _record(
        self, item: Item, answer: Generation, scores: TokenScores | None
    ) -> dict[str, Any]:
        signs = repetition(answer)
        record: dict[str, Any] = {
            "correct": bool(self.match()(answer.text, item.draft.accepted)),
            "group": item.draft.group,
            "expected": list(item.draft.accepted),
            "answer": answer.text[:_ANSWER_CHARACTERS],
            "prompt_tokens": len(item.prompt),
            "cached_tokens": answer.cached_tokens,
            "tokens": signs.tokens,
            "repeated_share": round(signs.repeated_share, 4),
            "loop_tokens": signs.loop_tokens,
            "hit_limit": signs.hit_limit,
        }
        if scores is not None:
            record["answer_nll"] = float(scores.nll.mean())
            if scores.kld is not None:
                record["answer_kld"] = float(scores.kld.mean())
        return record

    @staticmethod
    def report(records: Records) -> SuiteReport:
        """Return the table of the task."""
        return task_report(records)


def digest(path: Path) -> str:
    """Return the start of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
