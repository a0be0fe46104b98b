# SPDX-License-Identifier: Apache-2.0
"""What is recorded about quality, and what is said from it."""

import json
from dataclasses import replace

import pytest

from polykv_vllm.formats import FORMATS
from polykv_vllm.keys import AUTO, TREATMENTS
from polykv_vllm.quality import (
    FORMAT_OF_A_MODEL,
    QUALITY_FILE,
    Measurement,
    TaskScore,
    Verdict,
    measurements,
    nearest,
)

MEASURED = Measurement(
    model="m",
    architecture="LlamaForCausalLM",
    head_size=64,
    kv_cache_dtype="polykv_k7v4",
    key_treatment="auto",
    bytes_per_token=8280,
    ppl_change=(0.01, 0.0, 0.02),
    kld=(0.01, 0.009, 0.011),
    top1=0.95,
    tokens=1024,
)


@pytest.mark.parametrize(
    ("change", "kld", "verdict"),
    [
        (0.012, 0.011, Verdict.RECOMMENDED),
        (-0.012, 0.001, Verdict.RECOMMENDED),
        (0.0121, 0.001, Verdict.USABLE),
        (0.001, 0.0111, Verdict.USABLE),
        (0.04, 0.1, Verdict.USABLE),
        (0.041, 0.001, Verdict.LOSSY),
        (-0.041, 0.001, Verdict.LOSSY),
    ],
)
def test_verdicts(change: float, kld: float, verdict: Verdict) -> None:
    measured = replace(MEASURED, ppl_change=(change, 0, 0), kld=(kld, 0, 0))
    assert measured.verdict is verdict


@pytest.mark.parametrize(
    ("correct", "verdict"), [(16, Verdict.RECOMMENDED), (15, Verdict.USABLE)]
)
def test_a_lost_task_is_not_recommended(correct: int, verdict: Verdict) -> None:
    kept = TaskScore("needle", 20, 20, 20, (1.0, 0.84, 1.0))
    other = TaskScore("lines", correct, 20, 19, (0.95, 0.76, 0.99))
    assert replace(MEASURED, tasks=(kept, other)).verdict is verdict


def test_the_record_is_sound() -> None:
    rows = measurements()
    assert rows, "nothing is recorded"
    keys = {(r.model, r.kv_cache_dtype, r.key_treatment) for r in rows}
    assert len(keys) == len(rows)
    record = json.loads(QUALITY_FILE.read_text())
    # A score of a format without its perplexity would be in no table.
    for task in record["tasks"]:
        assert tuple(task[name] for name in FORMAT_OF_A_MODEL) in keys
        assert task["suite"] in record["runs"][task["model"]]
    for row in rows:
        assert row.kv_cache_dtype in FORMATS
        assert row.key_treatment in (AUTO, *TREATMENTS)
        for value, low, high in (row.ppl_change, row.kld):
            assert low <= value <= high
        assert row.kld[1] >= 0 and 0 < row.top1 <= 1
        assert (
            row.bytes_per_token % FORMATS[row.kv_cache_dtype].slot_bytes(row.head_size)
            == 0
        )


def test_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        MEASURED,
        replace(MEASURED, model="worse", kld=(0.02, 0.01, 0.03)),
        replace(MEASURED, model="untreated", key_treatment="none"),
        replace(MEASURED, model="wide", head_size=128),
        replace(MEASURED, model="other", architecture="Qwen2ForCausalLM"),
        replace(MEASURED, model="format", kv_cache_dtype="polykv_k8v3"),
    )
    monkeypatch.setattr("polykv_vllm.quality.measurements", lambda: rows)

    def names(*kind: object) -> list[str]:
        return [each.model for each in nearest(*kind)]  # type: ignore[arg-type]

    assert names("LlamaForCausalLM", 64, "polykv_k7v4") == ["worse", "m"]
    assert names("LlamaForCausalLM", 128, "polykv_k7v4") == ["wide"]
    # No such head size was measured: all of them say something.
    assert names("LlamaForCausalLM", 256, "polykv_k7v4") == ["worse", "m", "wide"]
    assert names("LlamaForCausalLM", 64, "polykv_k8v8") == []
