# SPDX-License-Identifier: Apache-2.0
"""The record beside every figure."""

import json

import pytest

from benchmarks import _environment


def test_describe_is_complete_and_json() -> None:
    record = json.loads(json.dumps(_environment.describe(threads=3)))
    assert record["threads"] == 3
    assert record["cpu"] and record["commit"]
    assert set(record["versions"]) == {"polykv-vllm", "vllm", "torch"}
    assert record["versions"]["polykv-vllm"] in _environment.headline(record)


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert _environment.describe(1)["commit"] == "unknown"
