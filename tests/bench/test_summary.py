# SPDX-License-Identifier: Apache-2.0
"""Results are put together and judged."""

from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.bench.results import SPEED, ResultFolder, RunKey
from polykv_vllm.bench.summary import Summary, collect
from tests.bench.records import ARMS, SCENARIO, environment, fill, phase, record


def changed(folder: ResultFolder, arm: str, **changes: Any) -> Summary:
    """Change the warm wave of one run and collect."""
    figures = {"cold": phase(15, 100.0), "warm": phase(15, 100.0, **changes)}
    folder.save(RunKey(SPEED, arm, "15x3072", 0), record(arm, figures))
    return collect(SCENARIO, ARMS, folder)


def test_good_results_have_no_problems(tmp_path: Path) -> None:
    summary = collect(SCENARIO, ARMS, fill(tmp_path))
    assert summary.problems == [] and summary.notes == []
    assert summary.ratio("15x3072", "polykv", "stock") == pytest.approx(1.6)
    assert summary.ratio("15x3072", "polykv", "stock-fp8") is None
    possible = (1 / 100 - 1 / 160) / (1 / 100 - 1 / 200)
    assert summary.possible("64x3072", "polykv", "stock") == pytest.approx(possible)
    assert summary.document_bytes("stock")[15] == 24 * 128 * 23040
    assert summary.resident_prefixes("polykv", 3072) == 1013 // 24
    assert summary.distinct_ratio("polykv") == 2.8


def test_missing_tokens_are_a_problem(tmp_path: Path) -> None:
    summary = changed(fill(tmp_path), "polykv", output_tokens=959)
    (problem,) = summary.problems
    assert "15x3072, polykv, repetition 1, warm: 959 output tokens" in problem
    assert "960 of 15 were asked for" in problem


def test_hit_rates_that_differ_are_a_problem(tmp_path: Path) -> None:
    summary = changed(fill(tmp_path), "polykv", hit_tokens=14 * 3072 - 128)
    (problem,) = summary.problems
    assert "different numbers of prompt tokens" in problem
    assert "stock 46,080" in problem and "polykv 42,880" in problem


def test_rounding_to_blocks_is_none(tmp_path: Path) -> None:
    summary = changed(fill(tmp_path), "polykv", hit_tokens=15 * (3072 - 128))
    assert summary.problems == []


def test_preemptions_are_noted(tmp_path: Path) -> None:
    summary = changed(fill(tmp_path), "polykv", preemptions=3)
    assert summary.notes == ["15x3072, polykv, repetition 1, warm: 3 preemptions"]


def test_busy_machines_and_mixed_commits_are_noted(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    figures = {"cold": phase(15, 100.0), "warm": phase(15, 100.0)}
    busy = environment(load_1min=7.0, commit="def5678")
    run = record("polykv", figures, environment=busy)
    folder.save(RunKey(SPEED, "polykv", "15x3072", 0), run)
    notes = collect(SCENARIO, ARMS, folder).notes
    assert "abc1234, def5678" in notes[0]
    assert "1 of 40 runs began on a busy machine" in notes[1]


def test_arms_without_results_are_left_out(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    folder.open(SCENARIO, "tiny", fresh=False)
    figures = {"cold": phase(15, 100.0), "warm": phase(15, 100.0)}
    folder.save(RunKey(SPEED, "stock", "15x3072", 0), record("stock", figures))
    summary = collect(SCENARIO, ARMS, folder)
    assert list(summary.cases["15x3072"]) == ["stock"]
    assert summary.cases["1x3072"] == {}
