# SPDX-License-Identifier: Apache-2.0
"""`polykv pool` without a server; `tests/e2e/test_pool_prefixes.py` has one."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from polykv_vllm.cli import app
from polykv_vllm.cli.pool import explanation

runner = CliRunner()
NOBODY = ["--url", "http://127.0.0.1:9"]


def test_nobody_answers() -> None:
    result = runner.invoke(app, ["pool", "ls", *NOBODY])
    assert result.exit_code == 1
    assert "127.0.0.1:9 does not answer" in result.output


@pytest.mark.parametrize(
    "given", [[], ["--text", "a", "--system", "b"], ["--file", "/no/such/file"]]
)
def test_one_prompt_is_needed(given: list[str]) -> None:
    result = runner.invoke(app, ["pool", "warm", "x", *given, *NOBODY])
    assert result.exit_code in (1, 2)
    assert "--file" in result.output


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text("[")
    result = runner.invoke(app, ["pool", "warm", "x", "--file", str(file), *NOBODY])
    assert result.exit_code == 1
    assert "messages.json" in result.output


def test_the_explanation_names_the_place() -> None:
    """CASES 27 and 28."""
    place = {"position": 41, "token": "M", "before": "Today is ", "after": "Monday"}
    found = {
        "tokens": 100,
        "hit_tokens": 32,
        "disk_tokens": 0,
        "block_size": 32,
        "prefixes": [
            {
                "name": "agents",
                "tokens": 90,
                "shared_tokens": 32,
                "below_a_block_tokens": 9,
                "diverges": place,
            }
        ],
    }
    text = "\n".join(explanation(found))
    assert "100 tokens: 32 are in memory and 0 more on disk" in text
    assert "agents: 32 of 90 tokens in whole blocks, and 9 below a block" in text
    assert "differs at token 41: 'M', in 'Today is ⟨here⟩Monday'" in text
    none = found | {"tokens": 9, "prefixes": []}
    assert "shorter prompt never hits" in "\n".join(explanation(none))
