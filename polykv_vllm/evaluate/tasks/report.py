# SPDX-License-Identifier: Apache-2.0
"""The table of a task: scores with intervals, differences by item."""

from collections.abc import Mapping
from typing import Any

from polykv_vllm.evaluate.arms import REFERENCE
from polykv_vllm.evaluate.statistics import (
    Interval,
    PairedProportions,
    paired_difference,
    paired_proportions,
)
from polykv_vllm.evaluate.suite import Records, SuiteReport
from polykv_vllm.reporting.table import Table

Figures = Mapping[str, Any]
NOTHING = "-"

_LEGEND = (
    "Intervals are 95 %: of a score Wilson's, of a difference to bf16 Newcombe's for "
    "the same items.\n"
    "won/lost: items that only this arm or only bf16 solved, with McNemar's exact p.\n"
    "length: of the answers, over bf16's; repeated: 4-grams of tokens that occurred "
    "before; cut: at the length limit; stuck: cut, and half of the answer or more is a "
    "loop."
)


def task_report(records: Records) -> SuiteReport:
    """Make the table of one task from the records of all arms."""
    report = SuiteReport()
    if not records:
        return report
    figures = {arm: record["figures"] for arm, record in records.items()}
    name = next(iter(records.values()))["suite"]
    has_nll = any("answer_nll" in each for each in figures.values())
    columns = ["arm", "right", "score", "95 %", "vs bf16", "95 %", "won/lost (p)"]
    if has_nll:
        columns += ["answer NLL", "vs bf16", "95 %"]
    columns += ["length", "repeated %", "cut", "stuck", "from cache", "s/item"]
    table = Table(f"Task: {name}", columns, legend=_LEGEND)
    reference = figures.get(REFERENCE)
    for arm, each in figures.items():
        row = [arm, *_score(each), *_difference(arm, each, reference)]
        if has_nll:
            row += _nll(arm, each, reference)
        table.rows.append(
            [
                *row,
                *_signs(each, reference),
                f"{each['cached_tokens'] / each['prompt_tokens']:.0%}",
                f"{each['seconds_per_item']:.1f}",
            ]
        )
    report.tables.append(table)
    if groups := _groups(name, figures):
        report.tables.append(groups)
    report.notes.extend(_notes(name, figures))
    return report


def compare(each: Figures, reference: Figures) -> PairedProportions | None:
    """Compare the items that both arms have; None if there are none."""
    ids = [key for key in each["items"] if key in reference["items"]]
    if not ids:
        return None
    return paired_proportions(
        [each["items"][key]["correct"] for key in ids],
        [reference["items"][key]["correct"] for key in ids],
    )


def compare_nll(each: Figures, reference: Figures) -> Interval | None:
    """Compare the likelihood of the answers that both arms have, nats per token."""
    ours, theirs = each["items"], reference["items"]
    ids = [
        key
        for key in ours
        if "answer_nll" in ours[key] and "answer_nll" in theirs.get(key, {})
    ]
    if not ids:
        return None
    return paired_difference(
        [ours[key]["answer_nll"] for key in ids],
        [theirs[key]["answer_nll"] for key in ids],
        each["seed"],
    )


def _score(each: Figures) -> list[str]:
    score = each["score"]
    return [
        f"{each['correct']}/{each['scored']}",
        f"{score['value']:.0%}",
        f"{score['low']:.0%}..{score['high']:.0%}",
    ]


def _difference(arm: str, each: Figures, reference: Figures | None) -> list[str]:
    if arm == REFERENCE or reference is None:
        return [NOTHING] * 3
    if (found := compare(each, reference)) is None:
        return [NOTHING] * 3
    points = found.difference
    return [
        f"{points.value:+.0%}",
        f"{points.low:+.0%}..{points.high:+.0%}",
        f"{found.gained}/{found.lost} ({found.p_value:.2f})",
    ]


def _nll(arm: str, each: Figures, reference: Figures | None) -> list[str]:
    own = f"{each['answer_nll']['value']:.3f}" if "answer_nll" in each else NOTHING
    if arm == REFERENCE or reference is None:
        return [own, NOTHING, NOTHING]
    if (found := compare_nll(each, reference)) is None:
        return [own, NOTHING, NOTHING]
    return [own, f"{found.value:+.3f}", f"{found.low:+.3f}..{found.high:+.3f}"]


def _signs(each: Figures, reference: Figures | None) -> list[str]:
    """Return what shows a model that rambles or is stuck."""
    signs = each["repetition"]
    theirs = reference["repetition"]["mean_tokens"] if reference else 0
    return [
        f"{signs['mean_tokens'] / theirs:.2f}" if theirs else NOTHING,
        f"{100 * signs['repeated_share']:.1f}",
        f"{signs['hit_limit']}/{signs['answers']}",
        f"{signs['stuck']}/{signs['answers']}",
    ]


def _groups(name: str, figures: Mapping[str, Figures]) -> Table | None:
    """Return right answers by group, such as the depth of a needle."""
    groups = sorted({group for each in figures.values() for group in each["groups"]})
    if len(groups) < 2:
        return None
    table = Table(f"Task: {name}, right answers by group", ["arm", *groups])
    for arm, each in figures.items():
        counts = [each["groups"].get(group, (0, 0)) for group in groups]
        table.rows.append([arm, *(f"{right}/{all_}" for right, all_ in counts)])
    return table


def _notes(name: str, figures: Mapping[str, Figures]) -> list[str]:
    """Say where fewer items were scored than asked for, and what is shared."""
    notes = []
    for arm, each in figures.items():
        too_long = len(each["too_long"])
        if each["scored"] < each["asked"] or too_long:
            why = f"; {too_long} longer than the model's context" if too_long else ""
            notes.append(
                f"{name}, {arm}: {each['scored']} items scored of {each['asked']} "
                f"asked{why}"
            )
        if each["prefix_tokens"]:
            notes.append(
                f"{name}, {arm}: all prompts share {each['prefix_tokens']} tokens, "
                f"computed once; {each['cached_tokens']} of {each['prompt_tokens']} "
                "prompt tokens came from the cache"
            )
    return notes
