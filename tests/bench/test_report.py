# SPDX-License-Identifier: Apache-2.0
"""What a person gets: tables, files and plots."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from polykv_vllm.bench import report
from polykv_vllm.bench.plots import CAPACITY, MEMORY, THROUGHPUT
from polykv_vllm.bench.results import ResultFolder
from polykv_vllm.bench.summary import collect
from polykv_vllm.bench.tables import NONE, all_tables, number
from tests.bench.records import ARMS, SCENARIO, fill

PLOTS = [THROUGHPUT, MEMORY, CAPACITY]


def test_tables_have_the_figures(tmp_path: Path) -> None:
    tables = {
        t.title: t.rows for t in all_tables(collect(SCENARIO, ARMS, fill(tmp_path)))
    }
    speed = tables["Decode throughput, warm prefix cache"]
    assert [row[0] for row in speed] == [
        *("1 x 3,072", "", "", ""),
        *("15 x 3,072", "", "", ""),
        *("64 x 3,072", "", "", ""),
    ]
    assert [row[1] for row in speed[4:8]] == SCENARIO.arms
    assert [row[3] for row in speed[4:8]] == [
        NONE,
        "1.20x (2.00x)",
        "1.60x (2.00x)",
        "2.00x",
    ]
    assert speed[0][2] == "102 (100-104)" and speed[0][-1] == "98.0%"
    first = tables["First token"][0]
    assert first[2:6] == ["0.40", "98.0%", "0.40", "98.0%"]
    following = tables["Next tokens, warm prefix cache, ms"][0]
    assert following[2:8] == ["100", "120", "150", "101", "110", "115"]
    assert tables["Cache of 256 MiB"][-1][:4] == ["polykv", "8,280", "32,384", "2.78x"]
    assert tables["Cache of 256 MiB"][-1][-3:] == ["14", "14", "2.80x"]
    memory = tables["Memory of one 3,072-token document, MiB"]
    assert memory[-1] == ["15", "1,012.5", "67.5", "24.3"]
    verdicts = [row[2:] for row in tables["Requirements"]]
    assert verdicts == [["1.50x", "1.60x", "yes"], ["2.70x", "2.80x", "yes"]]


def test_files_hold_everything(tmp_path: Path) -> None:
    summary = collect(SCENARIO, ARMS, fill(tmp_path))
    report.write(summary, tmp_path, "polykv bench agents")
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["command"] == "polykv bench agents"
    assert record["environment"]["commit"] == "abc1234"
    ours = record["cases"]["15x3072"]["polykv"]
    assert ours["decode_over"]["stock"] == pytest.approx(1.6)
    assert len(ours["warm"]) == SCENARIO.repetitions
    text = (tmp_path / "report.md").read_text()
    assert "| 15 x 3,072 | stock |" in text
    for name in PLOTS:
        assert f"]({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_one_number_of_agents_is_drawn_as_bars(tmp_path: Path) -> None:
    scenario = SCENARIO.model_copy(update={"agents": [15]})
    summary = collect(scenario, ARMS, fill(tmp_path, scenario))
    report.write(summary, tmp_path, "")
    assert (tmp_path / THROUGHPUT).exists()


def test_a_folder_without_results_gives_an_empty_report(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    folder.open(SCENARIO, "tiny", fresh=False)
    report.write(collect(SCENARIO, ARMS, folder), tmp_path, "")
    assert not list(tmp_path.glob("*.png"))


def test_problems_are_shown(tmp_path: Path) -> None:
    summary = collect(SCENARIO, ARMS, fill(tmp_path))
    summary.problems.append("[arm] died")
    console = Console(record=True, width=150)
    report.show(summary, tmp_path, console)
    assert "error: [arm] died" in console.export_text()


@pytest.mark.parametrize(
    ("value", "text"), [(1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text
