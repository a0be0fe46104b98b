# SPDX-License-Identifier: Apache-2.0
"""Recording runs of polykv eval: the rows, the file, the document."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import LlamaConfig

from benchmarks import quality
from polykv_vllm.quality import measurements


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.001, "high": value + 0.001}


def run_of(model: str, *arms: str) -> dict[str, Any]:
    """What `results.json` of such a run has."""
    figures = {"kld": interval(0.01), "ppl_change": interval(0.005)}
    figures |= {"top1": interval(0.9), "tokens": 2048}
    environment = {"cpu": "x", "commit": "abc", "versions": {}}
    record = {"figures": figures, "bytes_per_token": 1104, "environment": environment}
    return {
        "command": f"polykv eval {model}",
        "settings": {"model": model, "suites": {"perplexity": {"chunks_asked": 3}}},
        "records": {"perplexity": {arm: record for arm in arms}},
    }


def task_run_of(model: str, arm: str, correct: int) -> dict[str, Any]:
    """What `results.json` of a task has, in which bf16 solves 9 of 10 items."""

    def figures(correct: int) -> dict[str, Any]:
        score = {"value": correct / 10, "low": 0.6, "high": 0.98}
        return {"figures": {"correct": correct, "scored": 10, "score": score}}

    environment = {"environment": {"cpu": "x", "commit": "abc", "versions": {}}}
    asked = {"items": 10, "item_ids": ["1"]}
    return {
        "settings": {"model": model, "suites": {"lines": asked}},
        "records": {"lines": {"bf16": figures(9) | environment, arm: figures(correct)}},
    }


def record(folder: Path, run: dict[str, Any]) -> None:
    """Write a run folder and record it."""
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(run))
    quality.main([folder])


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=3,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_rows(model: str) -> None:
    rows = quality.rows_of(run_of(model, "bf16", "fp32", "polykv", "polykv_k7v4+none"))
    names = [(row["kv_cache_dtype"], row["key_treatment"]) for row in rows]
    assert names == [("polykv_k8v3", "auto"), ("polykv_k7v4", "none")]
    assert rows[0]["head_size"] == 64 and rows[0]["kld"] == [0.01, 0.009, 0.011]


def test_recording_replaces_a_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, document = tmp_path / "quality.json", tmp_path / "quality.md"
    data.write_text('{"measurements": [], "tasks": [], "runs": {}}')
    document.write_text(f"before\n{quality.BEGIN}\nold\n{quality.END}\nafter\n")
    monkeypatch.setattr(quality, "DOCUMENT", document)
    for module in (quality, __import__("polykv_vllm.quality").quality):
        monkeypatch.setattr(module, "QUALITY_FILE", data)
    try:
        for arms in (("polykv", "polykv_k8v8"), ("polykv_k7v4",)):
            record(tmp_path / "run", run_of(model, *arms))
        for correct in (7, 8):
            record(tmp_path / "run", task_run_of(model, "polykv_k7v4", correct))
        [measured] = measurements()
        assert measured.kv_cache_dtype == "polykv_k7v4"
        assert [task.correct for task in measured.tasks] == [8]
    finally:
        measurements.cache_clear()
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "old" not in text and "polykv_k8v8" not in text
    assert "| polykv_k7v4 | auto | 1,104 | +0.50 |" in text
    assert "| lines 8 (9) of 10 | recommended |" in text
    command = f"polykv eval {model} --arms polykv_k7v4"
    runs = json.loads(data.read_text())["runs"][model]
    assert runs["perplexity"]["command"] == f"{command} --max-chunks 3"
    assert runs["lines"]["command"] == f"{command} --suite lines --items 10"
    assert "item_ids" not in runs["lines"]["settings"]


def test_a_run_without_formats_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(run_of(model, "bf16")))
    with pytest.raises(typer.BadParameter, match="neither perplexity nor"):
        quality.main([tmp_path])


def test_the_document_is_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m benchmarks.quality` instead of editing the table."""
    text = quality.DOCUMENT.read_text()
    written: list[str] = []
    monkeypatch.setattr(Path, "write_text", lambda self, t: written.append(t))
    quality.write_document()
    assert written == [text]
