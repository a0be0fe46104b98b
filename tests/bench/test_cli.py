# SPDX-License-Identifier: Apache-2.0
"""`polykv bench agents` without an engine: listings, errors, reports of old runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polykv_vllm.bench.results import SPEED, RunKey
from polykv_vllm.cli import app
from tests.bench.records import SCENARIO, fill, phase, record

runner = CliRunner()


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    """The scenario of records.py as a file; its model is not looked for."""
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO.model_dump_json(exclude_none=True))  # JSON is YAML
    return path


def report_again(scenario_file: Path, folder: Path) -> tuple[int, str]:
    arguments = [str(scenario_file), "--output", str(folder), "--report-only"]
    result = runner.invoke(app, ["bench", "agents", *arguments])
    return result.exit_code, result.output


def test_list_explains_scenarios_and_arms() -> None:
    output = runner.invoke(app, ["bench", "agents", "--list"]).output
    for word in ("quick", "decisive", "nested", "stock-avx512", "polykv_k7v4"):
        assert word in output


def test_help() -> None:
    assert "agents" in runner.invoke(app, ["bench", "--help"]).output
    assert runner.invoke(app, ["bench", "agents", "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quik"], ["quik", "quick"]),
        (["--quick", "--arm", "stok"], ["stok", "polykv-unshared"]),
        (["--quick", "--cache-mib", "1", "--model", "no/such"], ["no/such"]),
    ],
)
def test_errors_exit_with_one(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = ["bench", "agents", *arguments, "--output", str(tmp_path)]
    result = runner.invoke(app, command)
    assert result.exit_code == 1
    assert "error:" in result.output
    for word in words:
        assert word in result.output


def test_old_runs_are_reported_again(scenario_file: Path, tmp_path: Path) -> None:
    fill(tmp_path / "out")
    code, output = report_again(scenario_file, tmp_path / "out")
    assert code == 0, output
    assert "Decode throughput, warm prefix cache" in output
    assert "report.json, report.md" in output


def test_wrong_runs_fail(scenario_file: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "out")
    figures = {"cold": phase(15, 100.0), "warm": phase(15, 100.0, output_tokens=1)}
    key = RunKey(SPEED, "polykv", "15x3072", 0)
    folder.save(key, record("polykv", figures))
    code, output = report_again(scenario_file, tmp_path / "out")
    assert code == 1
    assert "1 output tokens of 15 agents came" in output


def test_the_module_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.agents", "--list"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "decisive" in done.stdout
