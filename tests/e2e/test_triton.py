# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels in the real engine: interpreted, on a CPU."""

import json
import sys
from pathlib import Path

import pytest

from polykv_vllm.process import ProcessGroup

# Several engines, or long prompts, on a slow and busy machine.
pytestmark = pytest.mark.timeout(1500)

pytest.importorskip("vllm", reason="this is about vLLM's engine")
pytest.importorskip("triton", reason="Triton is not installed")


def test_greedy_text_is_that_of_the_cpp_kernels(tmp_path: Path) -> None:
    """A model of two layers, prompts in chunks, a prefix from the cache, a batch."""
    worker = [sys.executable, "-m", "tests.e2e.triton_worker", str(tmp_path)]
    with ProcessGroup(tmp_path / "log") as group:
        return_code = group.start(worker).wait()
    assert return_code == 0, (tmp_path / "log").read_text()[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    cpp, triton = found["cpp"], found["triton"]
    assert triton["isas"] == ["triton"] * 2
    assert "triton" not in cpp["isas"]
    assert triton["cached_tokens"] == cpp["cached_tokens"] == [0, 64, 64]
    assert triton["tokens"] == cpp["tokens"]
    assert all(len(tokens) == 4 for tokens in triton["tokens"])
