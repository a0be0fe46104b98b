# SPDX-License-Identifier: Apache-2.0
"""From the records of single items to the figures of a task."""

from collections.abc import Mapping
from typing import Any

from polykv_vllm.evaluate.answers import Repetition, summarize_repetition
from polykv_vllm.evaluate.statistics import bootstrap_mean, wilson
from polykv_vllm.evaluate.tasks.items import ItemSet

Record = Mapping[str, Any]


def task_figures(
    found: ItemSet, done: Mapping[str, Record], prefix_tokens: int, seed: int
) -> dict[str, Any]:
    """Return the figures of one arm for a JSON file.

    Args:
        found: What was asked.
        done: Records by item id; those of `found` are taken.
        prefix_tokens: That all prompts share and that were computed once.
        seed: Of the intervals.

    """
    records = {item.id: done[item.id] for item in found.items}
    rows = list(records.values())
    correct = sum(row["correct"] for row in rows)
    figures: dict[str, Any] = {
        "asked": found.asked,
        "scored": len(rows),
        "too_long": list(found.too_long),
        "correct": correct,
        "score": wilson(correct, len(rows)).as_dict(),
        "groups": _groups(rows),
        "prefix_tokens": prefix_tokens,
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows),
        "cached_tokens": sum(row["cached_tokens"] for row in rows),
        "repetition": summarize_repetition([_signs(row) for row in rows]),
        "seconds_per_item": sum(row["seconds"] for row in rows) / len(rows),
        "seed": seed,
        "items": records,
    }
    for name in ("answer_nll", "answer_kld"):
        values = [row[name] for row in rows if name in row]
        if values:
            figures[name] = bootstrap_mean(values, seed).as_dict()
    return figures


def _signs(row: Record) -> Repetition:
    return Repetition(
        row["tokens"], row["repeated_share"], row["loop_tokens"], row["hit_limit"]
    )


def _groups(rows: list[Record]) -> dict[str, list[int]]:
    """Return right answers and items of each group, where there are groups."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        if row["group"]:
            counts = groups.setdefault(row["group"], [0, 0])
            counts[0] += row["correct"]
            counts[1] += 1
    return dict(sorted(groups.items()))
