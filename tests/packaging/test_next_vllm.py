# SPDX-License-Identifier: Apache-2.0
"""`make test-next-vllm` on doctored copies of the installed vLLM; no index is asked."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seams.patched_vllm import ROOT, installed

pytest.importorskip("vllm", reason="the seams are about vLLM")
FILES = (
    "config/cache.py",
    "config/speculative.py",
    "engine/arg_utils.py",
    "model_executor/layers/attention/attention.py",
    "model_executor/model_loader/base_loader.py",
    "model_executor/model_loader/utils.py",
    "v1/attention/selector.py",
    "v1/core/kv_cache_utils.py",
    "v1/engine/core.py",
    "v1/worker/gpu_model_runner.py",
    "v1/core/sched/scheduler.py",
)


def report(tree: Path, *options: str) -> tuple[int, str]:
    tool = ROOT / "packaging" / "try_next_vllm.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--tree", str(tree), *options],
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_report_of_a_doctored_copy(tmp_path: Path) -> None:
    for name in FILES:
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed() / "vllm" / name, path)
    assert report(tmp_path, "--strict")[0] == 0
    scheduler = tmp_path / "vllm" / FILES[-1]
    text = scheduler.read_text()
    scheduler.write_text(text.replace("def _make_cached_request_data", "def _make"))
    (tmp_path / "vllm" / "v1" / "attention" / "selector.py").unlink()
    status, printed = report(tmp_path, "--strict")
    assert status == 1
    assert "11 of 13 seams fit" in printed
    assert (
        "LookupError" in printed and "no module vllm.v1.attention.selector" in printed
    )
    assert printed.count("CHANGED") == 2
    assert "would refuse this vLLM" in printed
    assert report(tmp_path)[0] == 0
