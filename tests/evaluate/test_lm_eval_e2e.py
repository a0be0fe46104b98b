# SPDX-License-Identifier: Apache-2.0
"""The command for lm-evaluation-harness that the documentation gives, run for real."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_vllm.models import build_model

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "evaluation_tasks.md"
ON_A_CPU = "enforce_eager=True,kv_cache_memory_bytes=268435456"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm-eval is not installed (pip install lm-eval)",
    ),
]


def documented_command() -> list[str]:
    """Return the words of the guide's `lm_eval` command."""
    block = re.search(r"^lm_eval run .*?^```", GUIDE.read_text(), re.M | re.S)
    assert block is not None
    return shlex.split(block[0].removesuffix("```").replace("\\\n", " "))


def test_the_documented_command_runs(tmp_path: Path) -> None:
    model = build_model("smollm2-135m-instruct")
    words = [
        f"{word.replace('pretrained=MODEL', f'pretrained={model}')},{ON_A_CPU}"
        if word.startswith("pretrained=")
        else word
        for word in documented_command()
    ]
    assert words[0] == "lm_eval"
    command = [sys.executable, "-m", *words, "--output_path", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "KV cache format polykv_k8v3" in done.stdout + done.stderr
    (path,) = tmp_path.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    # Eight countries, four cities each: two right is chance.
    assert results["capitals_choice"]["acc,none"] >= 0.75
    assert results["capitals_answer"]["exact_match,stripped"] >= 0.5
