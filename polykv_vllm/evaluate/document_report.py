# SPDX-License-Identifier: Apache-2.0
"""The tables of the suite `document`, from its records alone."""

from collections.abc import Mapping
from typing import Any

from polykv_vllm.evaluate.arms import REFERENCE
from polykv_vllm.evaluate.suite import Records, SuiteReport
from polykv_vllm.reporting.table import Table

Figures = Mapping[str, Any]
PRIVATE_COPIES = 15
"""Agents of the published comparison, each with a 16-bit copy of its own."""

_NOTHING = "-"
_MB = 1e6


def document_report(records: Records) -> SuiteReport:
    """Make the tables from the records of all arms."""
    if not records:
        return SuiteReport()
    figures = {arm: record["figures"] for arm, record in records.items()}
    settings = next(iter(records.values()))["settings"]
    return SuiteReport(
        [
            _continuations(figures, settings),
            _answers(figures, settings),
            _memory(figures, settings["tokens"]),
        ],
        _notes(figures),
    )


def _continuations(figures: Mapping[str, Figures], settings: Figures) -> Table:
    table = Table(
        f"One document in the cache: the rest of {settings['tokens']:,} tokens after "
        f"{settings['prefix_tokens']:,} cached ones, {settings['text']}",
        ["arm", "documents", "tokens", "PPL", "change %", "95 %", "KLD", "top-1 %"],
        legend="change: of perplexity against bf16; 95 %: over resampled documents, "
        "paired with bf16's",
    )
    for arm, each in figures.items():
        found = each["continuations"]
        table.rows.append(
            [
                arm,
                str(found["documents"]),
                f"{found['tokens']:,}",
                f"{found['ppl']['value']:.3f}",
                _value(found.get("ppl_change"), 100, "+.2f"),
                _bounds(found.get("ppl_change"), 100, "+.2f"),
                _value(found.get("kld"), 1, ".4f"),
                _value(found.get("top1"), 100, ".1f"),
            ]
        )
    return table


def _answers(figures: Mapping[str, Figures], settings: Figures) -> Table:
    table = Table(
        f"Agents over one document: answers of up to {settings['answer_tokens']} "
        "tokens, compared with bf16's",
        ["arm", "agents", "same", "F1", "95 %", "chrF", "parts at", "length"],
        legend="same: equal text; F1: of words, as SQuAD normalises them; parts at: "
        "median of the first token that differs; length: over bf16's.\n"
        "repeated: 4-grams that occurred before; stuck: cut at the length limit with "
        "half or more a loop.\n"
        "bf16 with itself: the same questions with fewer agents and with most: what "
        "batching alone changes.",
    )
    table.columns += ["repeated %", "cut", "stuck", "from cache", "s"]
    for arm, each in figures.items():
        table.groups.add(len(table.rows))
        for agents, run in each["agents"].items():
            table.rows.append(
                [arm, agents, *_agreement(run.get("agreement")), *_run(run)]
            )
        if arm == REFERENCE:
            for agents, found in each["with_itself"].items():
                row = [f"{arm} with itself", agents, *_agreement(found)]
                table.rows.append([*row, *[_NOTHING] * 5])
    return table


def _agreement(found: Figures | None) -> list[str]:
    if found is None:
        return [_NOTHING] * 6
    place = found["first_difference_median"]
    return [
        f"{found['exact']}/{found['answers']}",
        _value(found["token_f1"], 1, ".3f"),
        _bounds(found["token_f1"], 1, ".2f"),
        _value(found["chrf"], 1, ".1f"),
        _NOTHING if place is None else f"{place:.0f}",
        f"{found['length_ratio']:.2f}",
    ]


def _run(run: Figures) -> list[str]:
    signs = run["repetition"]
    return [
        f"{100 * signs['repeated_share']:.1f}",
        f"{signs['hit_limit']}/{signs['answers']}",
        f"{signs['stuck']}/{signs['answers']}",
        f"{run['cached_tokens'] / run['prompt_tokens']:.0%}",
        f"{run['seconds']:.1f}",
    ]


def _memory(figures: Mapping[str, Figures], tokens: int) -> Table:
    """Return the bytes of a document, against one shared copy and private ones."""
    stock = figures.get(REFERENCE, {}).get("bytes_per_token")
    table = Table(
        f"Memory of a document of {tokens:,} tokens",
        ["arm", "B/token", "MB", "vs vLLM's one shared 16-bit copy"],
        legend="vLLM's own prefix cache shares a document, too: against it the gain is "
        "the compression.\n"
        f"The published comparison is with {PRIVATE_COPIES} private 16-bit copies: the "
        "last columns.",
    )
    table.columns += [f"{PRIVATE_COPIES} private copies, MB", "saved %"]
    for arm, each in figures.items():
        size = each["bytes_per_token"]
        row = [arm, f"{size:,}", f"{tokens * size / _MB:.1f}"]
        if stock is None:
            table.rows.append([*row, *[_NOTHING] * 3])
            continue
        private = PRIVATE_COPIES * stock
        row.append(f"{stock / size:.2f}x smaller")
        row.append(f"{tokens * private / _MB:.1f}")
        table.rows.append([*row, f"{100 * (1 - size / private):.1f}"])
    return table


def _notes(figures: Mapping[str, Figures]) -> list[str]:
    notes = []
    for arm, each in figures.items():
        scored, asked = each["continuations"]["documents"], each["documents_asked"]
        if scored < asked:
            notes.append(
                f"document, {arm}: {scored} documents scored of {asked} asked: the "
                "text has no more"
            )
    return notes


def _value(interval: Figures | None, factor: float, form: str) -> str:
    if interval is None:
        return _NOTHING
    return format(interval["value"] * factor, form)


def _bounds(interval: Figures | None, factor: float, form: str) -> str:
    if interval is None or interval["low"] is None:
        return _NOTHING
    return "..".join(format(interval[end] * factor, form) for end in ("low", "high"))
