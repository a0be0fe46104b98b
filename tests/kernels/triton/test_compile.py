# SPDX-License-Identifier: Apache-2.0
"""The sample compiles for GPUs that are not here, without spilling a register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[3]
MAX_REGISTERS = 255


@pytest.mark.slow
def test_the_sample_compiles_without_spills() -> None:
    """In a process of its own, where Triton compiles and does not interpret."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_compile"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["kernel"] for r in results} == {"store", "prepare", "attend", "finish"}
    assert {r["capability"] for r in results} >= {75, 80, 86, 90}
    for result in results:
        assert result["spill_bytes"] == 0, result
        assert result["registers"] <= MAX_REGISTERS, result
        if result["kernel"] == "attend":
            # The products are the matrix unit's: for D = 64, 16 rows of two terms.
            assert result["matrix"] >= 32, result
