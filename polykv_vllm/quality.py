# SPDX-License-Identifier: Apache-2.0
"""What the formats were measured to lose, on which models: `quality.json`.

`python -m benchmarks.quality` writes the file from runs of `polykv eval`, and
docs/quality.md with it. Imports no torch and no vllm.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

QUALITY_FILE = Path(__file__).with_name("quality.json")

RECOMMENDED_KLD, RECOMMENDED_PPL_CHANGE = 0.011, 0.012
"""Nats per token, and relative: what a recommended format stays within."""
USABLE_PPL_CHANGE = 0.04
"""What the published format costs at most on the models it was tried on."""


class Verdict(StrEnum):
    """What a measurement means for somebody who serves the model."""

    RECOMMENDED = "recommended"
    USABLE = "usable"
    LOSSY = "lossy"


@dataclass(frozen=True)
class TaskScore:
    """Right answers of one format in one task, beside bf16's for the same items.

    Attributes:
        suite: Of `polykv eval`.
        correct: Right answers.
        scored: Items.
        reference: Right answers of bf16.
        reference_share: bf16's share of right answers, and Wilson's 95 % interval.

    """

    suite: str
    correct: int
    scored: int
    reference: int
    reference_share: tuple[float, float, float]

    @property
    def kept(self) -> bool:
        """Whether the score is not below bf16's interval."""
        return self.correct / self.scored >= self.reference_share[1]

    def __str__(self) -> str:
        """Return the score with bf16's in brackets."""
        return f"{self.suite} {self.correct} ({self.reference}) of {self.scored}"


@dataclass(frozen=True)
class Measurement:
    """One format on one model, against vLLM's own cache in bf16.

    Attributes:
        model: Name in the catalogue, or directory.
        architecture: As in its config.
        head_size: Elements of a head.
        kv_cache_dtype: Canonical name of the format.
        key_treatment: Of the keys; `auto` unless another was asked for.
        bytes_per_token: In all layers.
        ppl_change: Relative change of perplexity: value, and the ends of its interval.
        kld: KL(bf16 || format), nats per token, likewise.
        top1: Share of tokens whose likeliest prediction stayed.
        tokens: Scored.
        tasks: Scores, where tasks were measured.

    """

    model: str
    architecture: str
    head_size: int
    kv_cache_dtype: str
    key_treatment: str
    bytes_per_token: int
    ppl_change: tuple[float, float, float]
    kld: tuple[float, float, float]
    top1: float
    tokens: int
    tasks: tuple[TaskScore, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """From the measured values, not from the ends of their intervals.

        A task's score that is below bf16's interval takes the recommendation away.
        """
        change, kld = abs(self.ppl_change[0]), self.kld[0]
        close = change <= RECOMMENDED_PPL_CHANGE and kld <= RECOMMENDED_KLD
        if close and all(task.kept for task in self.tasks):
            return Verdict.RECOMMENDED
        return Verdict.USABLE if change <= USABLE_PPL_CHANGE else Verdict.LOSSY

    def describe(self) -> str:
        """Return the figures in a line."""
        return (
            f"perplexity {100 * self.ppl_change[0]:+.1f} %, KL divergence "
            f"{self.kld[0]:.4f}, same top token {100 * self.top1:.1f} %"
        )


@cache
def measurements() -> tuple[Measurement, ...]:
    """Return all that is recorded."""
    record = json.loads(QUALITY_FILE.read_text())
    return tuple(_measurement(row, record["tasks"]) for row in record["measurements"])


FORMAT_OF_A_MODEL = ("model", "kv_cache_dtype", "key_treatment")
"""What a row of the file is about: its key."""


def _measurement(row: dict[str, Any], tasks: list[dict[str, Any]]) -> Measurement:
    ends = {name: tuple(row[name]) for name in ("ppl_change", "kld")}
    scores = tuple(
        TaskScore(
            task["suite"],
            task["correct"],
            task["scored"],
            task["reference"],
            tuple(task["reference_share"]),
        )
        for task in tasks
        if all(task[name] == row[name] for name in FORMAT_OF_A_MODEL)
    )
    return Measurement(**row | ends, tasks=scores)


def nearest(
    architecture: str, head_size: int, kv_cache_dtype: str
) -> Sequence[Measurement]:
    """Return what was measured of a format on models of this kind, worst first.

    Args:
        architecture: As in the config.
        head_size: Elements of a head; other sizes count only where this one is not
            among the measured ones.
        kv_cache_dtype: Canonical name of the format.

    """
    found = [
        each
        for each in measurements()
        if (each.architecture, each.kv_cache_dtype) == (architecture, kv_cache_dtype)
        and each.key_treatment == "auto"
    ]
    same = [each for each in found if each.head_size == head_size]
    return sorted(same or found, key=lambda each: -each.kld[0])
