# SPDX-License-Identifier: Apache-2.0
"""The store benchmark compares bytes before it times."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

pytest.importorskip("vllm")

from benchmarks import store
from polykv_vllm import ops


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(store.main)
    return CliRunner().invoke(app, ["--quick", "--shape", "2/1/64", *arguments])


def test_quick_mode(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    result = run("--json", str(path))
    assert result.exit_code == 0, result.output
    timings = json.loads(path.read_text())["timings"]["2/1/64"]
    assert {name.split()[0] for name in timings} == {"polykv", "vLLM"}


def test_wrong_bytes_get_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = ops.reshape_and_cache

    def wrong(key: Any, value: Any, *others: Any, **options: Any) -> None:
        right(value, key, *others, **options)

    monkeypatch.setattr(ops, "reshape_and_cache", wrong)
    path = tmp_path / "store.json"
    result = run("--json", str(path))
    assert result.exit_code == 1
    assert "bytes differ" in result.output
    assert json.loads(path.read_text())["timings"] == {"2/1/64": {}}


def test_unsupported_head_size_is_a_usage_error() -> None:
    assert run("--shape", "2/1/48").exit_code == 2
