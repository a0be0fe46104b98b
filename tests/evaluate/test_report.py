# SPDX-License-Identifier: Apache-2.0
"""What a person gets from a run folder: tables, files, plots."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from polykv_vllm.evaluate.perplexity_report import report as perplexity_report
from polykv_vllm.evaluate.plots import Point, pareto_front
from polykv_vllm.evaluate.report import Report
from tests.evaluate.records import BYTES, SUITE, fill


def test_the_table_has_the_figures(tmp_path: Path) -> None:
    records = fill(tmp_path).records()[SUITE]
    (table,) = perplexity_report(records).tables
    assert [row[0] for row in table.rows] == list(BYTES)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["polykv"]["change %"] == "+3.05"
    assert rows["polykv"]["ratio"] == "2.78"
    assert rows["polykv"]["top-1 %"] == "96.88"
    assert rows["bf16"]["KLD"] == "-"
    assert "text.txt, 4 x 64 tokens, scored from 32" in table.title


def test_fewer_chunks_than_asked_are_said(tmp_path: Path) -> None:
    records = fill(tmp_path, chunks=1, asked=9).records()[SUITE]
    notes = perplexity_report(records).notes
    assert any("1 chunks were scored, 9 were asked for" in note for note in notes)
    assert "one chunk has no interval" in notes


def test_files_are_written_and_named(tmp_path: Path) -> None:
    report = Report(fill(tmp_path), "polykv eval tiny", ["arm fp8: [it] died"])
    report.write()
    console = Console(width=150, record=True)
    report.show(console)
    printed = console.export_text()
    assert "results.json, report.md, kld.png, ppl.png" in printed
    assert "error: arm fp8: [it] died" in printed
    written = (tmp_path / "report.md").read_text()
    assert "polykv eval tiny" in written and "![kld](kld.png)" in written
    assert "| polykv_k7v4 |" in written and "**Error:** arm fp8" in written
    results = json.loads((tmp_path / "results.json").read_text())
    assert next(iter(results["records"][SUITE])) == "bf16"
    for name in ("kld.png", "ppl.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_records_of_several_commits_are_said(tmp_path: Path) -> None:
    store = fill(tmp_path)
    record = store.record("polykv", SUITE)
    assert record is not None
    record["environment"]["commit"] = "def"
    store.save("polykv", SUITE, record)
    assert "different commits: abc, def" in " ".join(Report(store, "").notes)


@pytest.mark.parametrize(
    ("is_signed", "names"), [(False, ["a", "c"]), (True, ["b", "d"])]
)
def test_the_front_is_what_no_other_beats(is_signed: bool, names: list[str]) -> None:
    points = [
        Point("a", 10, -3.0),
        Point("b", 10, 2.0),
        Point("c", 20, -4.0),
        Point("d", 20, 0.5),
        Point("e", 30, 0.5),
    ]
    assert [p.arm for p in pareto_front(points, is_signed)] == names
