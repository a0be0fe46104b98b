# SPDX-License-Identifier: Apache-2.0
"""What the command line says about the suites."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TaskOptions:
    """Options of retrieval and of tasks.

    Attributes:
        data: Folder with the files of the tasks; None: what POLYKV_DATA names.
        items: Most items of a task.
        seed: Of everything that is drawn, and of the intervals.
        batch: Most requests at once.
        needle_tokens: Length of the text that a number is hidden in.
        needle_depths: Where it is hidden, 0 (start) to 1 (end), in turn.
        haystack: That text; None: the passages in `data`.
        kv_keys: Keys of a JSON object, one of which is asked for.
        lines: Lines, one of which is asked for.
        shots: Worked examples before a GSM8K question.
        file: JSON lines of the task `jsonl`.
        prompt_field: Of a line of `file`.
        answer_field: Likewise: a string, a number, or a list of accepted ones.
        match: When an answer counts: one of `scorers.MATCHES`.
        answer_tokens: Longest answer; None: what the task takes to need.

    """

    data: Path | None = None
    items: int = 20
    seed: int = 0
    batch: int = 8
    needle_tokens: int = 1800
    needle_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    haystack: Path | None = None
    kv_keys: int = 20
    lines: int = 60
    shots: int = 8
    file: Path | None = None
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    match: str = "contains"
    answer_tokens: int | None = None


@dataclass(frozen=True)
class DocumentOptions:
    """Options of the protocol of one document and many agents.

    Attributes:
        document: File with the text; None: the default text.
        tokens: Of one document.
        documents: Consecutive pieces of the text, for an interval.
        prefix_share: Part of a document that is in the cache when the rest is scored.
        agents: How many ask at once, one run for each number.
        questions: File with a question a line, asked first; None: general ones only.
        answer_tokens: Longest answer.
        seed: Of the intervals.

    """

    document: Path | None = None
    tokens: int = 3072
    documents: int = 4
    prefix_share: float = 0.7
    agents: tuple[int, ...] = (1, 3, 5, 10, 15)
    questions: Path | None = None
    answer_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class SuiteOptions:
    """Options of all suites; each takes its own.

    Attributes:
        text: File whose tokens are scored; None: the default text.
        chunk_tokens: Tokens of a chunk, the beginning-of-sequence token included;
            None: as suits the text.
        stride: Tokens from one chunk to the next; None: they do not overlap.
        score_from: First scored position of a chunk; None: its second half.
        max_chunks: Most chunks; None: as many as the text has.
        tasks: Of retrieval and tasks.
        document: Of the protocol of one document and many agents.

    """

    text: Path | None = None
    chunk_tokens: int | None = None
    stride: int | None = None
    score_from: int | None = None
    max_chunks: int | None = None
    tasks: TaskOptions = field(default_factory=TaskOptions)
    document: DocumentOptions = field(default_factory=DocumentOptions)
