# SPDX-License-Identifier: Apache-2.0
"""`polykv eval` as a person runs it, on the real engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.keys.transform import TREATMENTS
from polykv_vllm.models import build_model

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
ARMS = ["bf16", "polykv_k8v8"]


def run(output: Path, *options: str) -> tuple[int, str]:
    """Run `polykv eval`; return exit code and output."""
    arguments = [MODEL, "--output", str(output), "--arms", "polykv_k8v8", *options]
    arguments += ["--text", str(ROOT / "LICENSE")]
    arguments += ["--chunk-tokens", "256", "--max-chunks", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "polykv_vllm.cli", "eval", *arguments],
        capture_output=True,
        text=True,
        cwd=output.parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build_model(MODEL)
    folder = tmp_path_factory.mktemp("eval") / "run"
    code, printed = run(folder)
    assert code == 0, printed
    assert "Perplexity and divergence: LICENSE, 2 x 256 tokens" in printed
    return folder


def times_of_logs(output: Path) -> dict[str, int]:
    """When each engine's log was written to; one that starts writes its own anew."""
    logs = {path.name: path.stat().st_mtime_ns for path in output.glob("logs/*")}
    assert logs.keys() == {f"{arm}.log" for arm in ARMS}
    return logs


def figures(output: Path) -> dict[str, dict[str, Any]]:
    results = json.loads((output / "results.json").read_text())
    records = results["records"]["perplexity"]
    assert list(records) == ARMS, "the reference first"
    return {arm: record["figures"] for arm, record in records.items()}


def test_eight_bits_are_close_to_sixteen_but_not_the_same(output: Path) -> None:
    found = figures(output)
    assert {arm: f["tokens"] for arm, f in found.items()} == dict.fromkeys(ARMS, 256)
    assert 2 < found["bf16"]["ppl"]["value"] < 40
    ours = found["polykv_k8v8"]
    assert 0 < ours["kld"]["value"] < 0.01
    assert ours["kld"]["value"] < ours["kld_p99"] <= ours["kld_max"]
    assert 0.9 < ours["top1"]["value"] <= 1
    assert abs(ours["ppl_change"]["value"]) < 0.02
    assert "kld" not in found["bf16"]


def test_the_folder_says_what_was_measured(output: Path) -> None:
    results = json.loads((output / "results.json").read_text())
    settings = results["settings"]
    assert settings["model"] == MODEL and settings["engine_version"].startswith("vllm")
    assert settings["suites"]["perplexity"]["chunk_tokens"] == 256
    record = results["records"]["perplexity"]["polykv_k8v8"]
    assert record["engine"]["attention"] == ["PolyKVImpl"]
    assert record["engine"]["key_treatment"] in TREATMENTS
    assert record["bytes_per_token"] == 30 * 3 * 132
    assert record["environment"]["versions"]["vllm"].startswith("0.32")
    for name in ("report.md", "kld.png", "ppl.png", "logs/bf16.log"):
        assert (output / name).stat().st_size > 0


def test_the_same_command_has_nothing_left_to_do(output: Path) -> None:
    before, logs = figures(output), times_of_logs(output)
    code, printed = run(output)
    assert code == 0, printed
    assert "2 of 2 records are in" in printed
    assert times_of_logs(output) == logs, "an engine was started"
    assert figures(output) == before


def test_an_interrupted_run_goes_on_at_the_next_chunk(output: Path) -> None:
    """The last chunk is scored again: to the same bits, as our attention promises."""
    before = figures(output)["polykv_k8v8"]
    items = output / "items" / "polykv_k8v8.perplexity.jsonl"
    first, second = items.read_text().splitlines(keepends=True)
    items.write_text(first + second[: len(second) // 2])
    (output / "records" / "polykv_k8v8.perplexity.json").unlink()
    code, printed = run(output)
    assert code == 0, printed
    assert "1 of 2 records are in" in printed
    assert items.read_text().startswith(first)
    after = figures(output)["polykv_k8v8"]
    times = ("seconds_per_chunk",)
    assert {k: v for k, v in after.items() if k not in times} == {
        k: v for k, v in before.items() if k not in times
    }
