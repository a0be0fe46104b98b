# SPDX-License-Identifier: Apache-2.0
"""The command as a whole: light to start, clear when it fails."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from polykv_vllm import __version__
from polykv_vllm.cli import app

runner = CliRunner()


def test_help_lists_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("info", "check", "model", "demo"):
        assert command in result.output


@pytest.mark.parametrize("command", ["info", "check", "model", "demo"])
def test_each_command_has_help(command: str) -> None:
    assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output.split() == [
        "polykv-vllm",
        __version__,
    ]


def test_start_imports_nothing_heavy() -> None:
    script = (
        "import sys, polykv_vllm.cli, polykv_vllm.models\n"
        "heavy = {'torch', 'vllm', 'transformers', 'openai'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_unknown_model_name_says_which_exist() -> None:
    result = runner.invoke(app, ["model", "gpt-17"])
    assert result.exit_code == 1
    assert "gpt-17" in result.output
    assert "smollm2-135m-instruct" in result.output


def test_markup_in_an_error_is_printed_as_it_is() -> None:
    result = runner.invoke(app, ["model", "[bold]x[/bold]"])
    assert "[bold]x[/bold]" in result.output
