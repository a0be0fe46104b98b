# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the key treatments compares outputs before it times."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import keys


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(keys.main)
    return CliRunner().invoke(app, ["--quick", "--shape", "2/1/64", *arguments])


def test_quick_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    result = run("--json", str(path))
    assert result.exit_code == 0, result.output
    timings = json.loads(path.read_text())["timings"]
    assert len(timings) == 4
    assert all(tuple(each) == keys.ARMS for each in timings.values())


def test_another_output_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_DIFFERENCE", 1e-6)
    result = run()
    assert result.exit_code == 1
    assert "channel_scale is off by" in result.output
