# SPDX-License-Identifier: Apache-2.0
"""Runs the tests in `interpreted/` where Triton interprets its kernels.

Whether it does is settled when a kernel is defined, so they need a process of their
own: in this one other tests compile.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["store", "attention", "bitwise", "benchmark"])
def test_in_the_interpreter(name: str) -> None:
    tests = f"tests/kernels/triton/interpreted/test_{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
