# SPDX-License-Identifier: Apache-2.0
"""Table and plots of the suite `perplexity`, from its records alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polykv_vllm.evaluate.arms import REFERENCE
from polykv_vllm.evaluate.plots import Point, draw_cost
from polykv_vllm.evaluate.suite import Records, SuiteReport
from polykv_vllm.reporting.table import Table

_NONE = "-"
KLD_PLOT, PPL_PLOT = "kld.png", "ppl.png"


def report(records: Records) -> SuiteReport:
    """Make the table, and with it the plots of what has a divergence."""
    compared = {
        arm: record for arm, record in records.items() if "kld" in record["figures"]
    }
    model = next(iter(records.values()))["model"]
    made = SuiteReport([_table(records)], _notes(records))
    if compared:
        title = f"{model}, {_text_words(records)}"
        kld = [_point(arm, record, "kld", 1.0) for arm, record in compared.items()]
        ppl = [
            _point(arm, record, "ppl_change", 100.0) for arm, record in compared.items()
        ]
        stock = records.get(REFERENCE, {}).get("bytes_per_token")
        made.plots = {
            KLD_PLOT: partial(
                draw_cost,
                kld,
                stock,
                "KL divergence from bf16, nats per token",
                title,
                is_log=True,
            ),
            PPL_PLOT: partial(
                draw_cost, ppl, stock, "change of perplexity, %", title, is_log=False
            ),
        }
    return made


def _table(records: Records) -> Table:
    table = Table(
        f"Perplexity and divergence: {_text_words(records)}",
        ["arm", "keys", "B/token", "ratio", "PPL", "change %", "95 %"],
        words=2,
    )
    table.columns += ["KLD", "95 %", "top-1 %"]
    stock = records.get(REFERENCE, {}).get("bytes_per_token")
    for arm, record in records.items():
        figures = record["figures"]
        size = record["bytes_per_token"]
        table.rows.append(
            [
                arm,
                record["engine"].get("key_treatment") or _NONE,
                f"{size:,}",
                _NONE if not stock else f"{stock / size:.2f}",
                f"{figures['ppl']['value']:.3f}",
                *_with_interval(figures.get("ppl_change"), 100.0, "+.2f"),
                *_with_interval(figures.get("kld"), 1.0, ".4f"),
                _number(figures.get("top1", {}).get("value"), 100.0, ".2f"),
            ]
        )
    table.legend = (
        "keys: what is done to them before they are quantized\n"
        "change, KLD, top-1: against bf16, vLLM's own cache; KLD in nats over the "
        "whole vocabulary, fp32\n"
        "95 %: interval over resampled chunks, paired with bf16's\n"
        "fp32: vLLM's own cache and model in fp32, the noise that bf16 arithmetic "
        "makes by itself"
    )
    return table


def _text_words(records: Records) -> str:
    record = next(iter(records.values()))
    settings = record["settings"]
    return (
        f"{settings['text']}, {record['figures']['chunks']} x "
        f"{settings['chunk_tokens']:,} tokens, scored from {settings['score_from']:,} "
        f"on ({record['figures']['tokens']:,} tokens)"
    )


def _with_interval(
    interval: Mapping[str, Any] | None, factor: float, form: str
) -> list[str]:
    if interval is None:
        return [_NONE, _NONE]
    low, high = (_number(interval[end], factor, form) for end in ("low", "high"))
    return [
        _number(interval["value"], factor, form),
        _NONE if low == _NONE else f"{low}..{high}",
    ]


def _number(value: float | None, factor: float, form: str) -> str:
    return _NONE if value is None else f"{value * factor:{form}}"


def _notes(records: Records) -> list[str]:
    notes = []
    for arm, record in records.items():
        chunks, asked = record["figures"]["chunks"], record["settings"]["chunks_asked"]
        if asked is not None and chunks < asked:
            notes.append(
                f"{arm}: {chunks} chunks were scored, {asked} were asked for: the text "
                "has no more"
            )
    first = next(iter(records.values()))["figures"]
    if first["chunks"] == 1:
        notes.append("one chunk has no interval")
    return notes


def _point(arm: str, record: Mapping[str, Any], name: str, factor: float) -> Point:
    figure = record["figures"][name]
    low, high = (
        None if figure[end] is None else figure[end] * factor for end in ("low", "high")
    )
    return Point(arm, record["bytes_per_token"], figure["value"] * factor, low, high)
