# SPDX-License-Identifier: Apache-2.0
"""GSM8K with worked examples that all questions share, and any file of questions."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.tasks import scorers
from polykv_vllm.evaluate.tasks.items import Draft
from polykv_vllm.evaluate.tasks.jsonl import data_file, read_lines
from polykv_vllm.evaluate.tasks.prompts import PromptEncoder
from polykv_vllm.evaluate.tasks.suite import TaskSuite

SHOTS_FILE = "gsm8k_train_first40_fewshot.jsonl"
QUESTIONS_FILE = "gsm8k_test_200.jsonl"


class Gsm8kSuite(TaskSuite):
    """Grade-school sums (Cobbe et al. 2021, arXiv 2110.14168).

    The answer is the number after `####`, as the worked examples show it.
    """

    name: ClassVar[str] = "gsm8k"
    answer_tokens: ClassVar[int] = 256
    # A base model goes on with a question of its own.
    stop: ClassVar[tuple[str, ...]] = ("Question:",)

    def check(self) -> None:
        """See the base class; without an example no model knows the mark."""
        super().check()
        if self.options.shots < 1:
            raise EvalError(
                f"gsm8k: at least one worked example, not {self.options.shots}: "
                f"they show the model to end with {scorers.FINAL_ANSWER!r}"
            )

    def files(self) -> list[Path]:
        """Return the worked examples and the questions."""
        return [
            data_file(self.options.data, name, self.name)
            for name in (SHOTS_FILE, QUESTIONS_FILE)
        ]

    def task_settings(self) -> dict[str, Any]:
        """Return the number of worked examples."""
        return {"shots": self.options.shots}

    def match(self) -> scorers.Match:
        """Return the strict score: no mark, no answer."""
        return scorers.marked_number

    def drafts(self, encoder: PromptEncoder) -> Iterator[Draft]:
        """Yield the questions, all behind the same examples.

        Raises:
            EvalError: There are fewer examples than asked for.

        """
        examples, questions = self.files()
        shots = [
            f"Question: {line.text('question')}\nAnswer: {line.text('answer')}\n\n"
            for line in islice(read_lines(examples), self.options.shots)
        ]
        if len(shots) < self.options.shots:
            raise EvalError(
                f"gsm8k: {self.options.shots} worked examples asked for, "
                f"{examples} has {len(shots)}"
            )
        for line in read_lines(questions):
            answer = line.text("answer")
            if scorers.FINAL_ANSWER not in answer:
                raise line.error(f"'answer' has no {scorers.FINAL_ANSWER!r}")
            yield Draft(
                id=f"{self.options.shots}shot-{line.number:04d}",
                user=f"{''.join(shots)}Question: {line.text('question')}\nAnswer:",
                accepted=(answer.split(scorers.FINAL_ANSWER)[-1].strip(),),
            )


class JsonlSuite(TaskSuite):
    """A prompt and an answer a line, from a file of one's own."""

    name: ClassVar[str] = "jsonl"
    answer_tokens: ClassVar[int] = 64

    def check(self) -> None:
        """See the base class; the way to match must be known."""
        super().check()
        if self.options.match not in scorers.MATCHES:
            raise EvalError(
                f"jsonl: there is no match {self.options.match!r}; "
                f"there are: {', '.join(scorers.MATCHES)}"
            )

    def files(self) -> list[Path]:
        """Return the file.

        Raises:
            EvalError: None is named.

        """
        if self.options.file is None:
            raise EvalError("jsonl: name the file with --tasks-file")
        return [self.options.file]

    def task_settings(self) -> dict[str, Any]:
        """Return the names of the fields."""
        return {
            "prompt_field": self.options.prompt_field,
            "answer_field": self.options.answer_field,
        }

    def match(self) -> scorers.Match:
        """Return the chosen way."""
        return scorers.MATCHES[self.options.match]

    def drafts(self, encoder: PromptEncoder) -> Iterator[Draft]:
        """Yield the lines as they are."""
        for line in read_lines(self.files()[0]):
            yield Draft(
                id=f"{line.number:04d}",
                user=line.text(self.options.prompt_field),
                accepted=line.texts(self.options.answer_field),
            )
