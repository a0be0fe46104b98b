# SPDX-License-Identifier: Apache-2.0
"""`polykv eval` without an engine: errors, and reports of old runs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from polykv_vllm.cli import app
from tests.evaluate.records import fill

runner = CliRunner()


def test_help() -> None:
    assert runner.invoke(app, ["eval", "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["which model", "--quick"]),
        (["m", "--arms", "polykv_k9"], ["polykv_k9", "bf16", "polykv_k7v4"]),
        (["m", "--suite", "speed"], ["speed", "perplexity"]),
        (["m", "--engine", "llama"], ["llama", "vllm, hf"]),
        (["m", "--text", "nothing.txt"], ["nothing.txt", "No such file"]),
        (["m", "--chunk-tokens", "8", "--score-from", "9"], ["position 9 of 8"]),
        (["no/such"], ["no/such"]),
        (["m", "--threads", "9999"], ["9999 compute threads"]),
        (["m", "--report-only"], ["no results"]),
    ],
)
def test_errors_exit_with_one(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = ["eval", *arguments, "--output", str(tmp_path / "run")]
    result = runner.invoke(app, command)
    assert result.exit_code == 1, result.output
    assert "error:" in result.output
    for word in words:
        assert word in result.output


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A model directory without tokenizer and weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    return folder


def test_a_model_without_a_tokenizer_is_an_error(
    config_only: Path, tmp_path: Path
) -> None:
    command = ["eval", str(config_only), "--output", str(tmp_path / "run")]
    result = runner.invoke(app, command)
    assert result.exit_code == 1
    assert f"no tokenizer for {config_only}" in " ".join(result.output.split())


def test_old_runs_are_reported_again(tmp_path: Path) -> None:
    fill(tmp_path)
    command = ["eval", "tiny", "--output", str(tmp_path), "--report-only"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "Perplexity and divergence" in result.output
    assert (tmp_path / "report.md").exists()
