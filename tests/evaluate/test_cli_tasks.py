# SPDX-License-Identifier: Apache-2.0
"""`polykv eval`: what is wrong with a task is said before a model is looked at."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polykv_vllm.cli.app import app

pytest.importorskip("matplotlib")
pytest.importorskip("sacrebleu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "jsonl"], "name the file with --tasks-file"),
        (["--suite", "jsonl", "--tasks-file", "none.jsonl"], "there is no file"),
        (["--suite", "lines", "--data", "/none"], "which /none does not have"),
        (["--suite", "document", "--agents", "1,x"], "--agents 1,x: numbers"),
        (["--suite", "document", "--agents", "99"], "99 agents ask a question each"),
        (["--suite", "document", "--document", "none.md"], "none.md"),
        (["--suite", "needles"], "there are: perplexity, document, needle"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["eval", "no-such-model", *arguments])
    assert result.exit_code == 1
    assert words in result.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are made after the tokenizer is there, before an engine starts."""
    from polykv_vllm.models import built_model

    model = built_model("smollm2-135m-instruct")
    if model is None:
        pytest.skip("smollm2-135m-instruct is not built")
    monkeypatch.chdir(tmp_path)
    Path("own.jsonl").write_text(json.dumps({"text": "x", "answer": "y"}) + "\n")
    arguments = ["--suite", "jsonl", "--tasks-file", "own.jsonl"]
    result = CliRunner().invoke(app, ["eval", str(model), *arguments])
    assert result.exit_code == 1
    assert "line 1: no field 'prompt'; there are: text, answer" in result.stderr
