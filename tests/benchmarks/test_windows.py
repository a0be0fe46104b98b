# SPDX-License-Identifier: Apache-2.0
"""The benchmark of windows checks every arm before it times."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import windows


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(windows.main)
    return CliRunner().invoke(app, ["--quick", "--shape", "2/1/64", *arguments])


def test_quick_mode(tmp_path: Path) -> None:
    path = tmp_path / "windows.json"
    result = run("--windows", "4/32", "--windows", "40/0", "--json", str(path))
    assert result.exit_code == 0, result.output
    arms = {"none", "4/32", "4/32 yardstick", "40/0"}
    for case in json.loads(path.read_text())["results"]:
        assert set(case["timings"]) == arms


def test_wrong_rows_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is given other raw rows than the oracle."""
    call = windows.WindowKernel.__call__

    def wrong(self: Any, round_number: int) -> None:
        raw = self.raw
        if raw is not None:
            self.raw = windows.ops.RawRows(raw.value, raw.key, raw.window_cache)
        call(self, round_number)
        self.raw = raw

    monkeypatch.setattr(windows.WindowKernel, "__call__", wrong)
    result = run("--windows", "4/32")
    assert result.exit_code == 1
    assert "refcheck failed" in result.output


def test_windows_that_are_none() -> None:
    assert run("--windows", "4").exit_code != 0
