# SPDX-License-Identifier: Apache-2.0
"""The benchmark itself, with real servers, vLLM's client and a real model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.process import group_members

# Servers and clients, one after the other, of which each imports vLLM.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

SCENARIO = """
arms: [stock, polykv]
agents: [3]
shared_tokens: [256]
own_tokens: 32
output_tokens: 8
cache_mib: 64
block_size: 32
repetitions: 1
memory_figure: {agents: 3, shared_tokens: 256}
"""
COMMAND = [sys.executable, "-m", "polykv_vllm.cli", "bench", "agents"]


def command(folder: Path, *options: str) -> list[str]:
    """Return the benchmark's command line, with the scenario in `folder`."""
    path = folder / "tiny.yaml"
    path.write_text(SCENARIO)
    return [*COMMAND, str(path), "--output", str(folder / "out"), *options]


def finished(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *options), capture_output=True, text=True, timeout=1200
    )


def test_both_arms_are_measured_and_kept(tmp_path: Path) -> None:
    done = finished(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((tmp_path / "out/report.json").read_text())
    arms = record["cases"]["3x256"]
    assert set(arms) == {"stock", "polykv"}
    for row in arms.values():
        (warm,) = row["warm"]
        assert warm["output_tokens"] == warm["requested_output_tokens"] == 3 * 8
        assert warm["hit_tokens"] == 3 * 256
        assert warm["prompt_tokens"] == 3 * (256 + 32)
        assert warm["decode_tokens_per_s"] > 0
    # One document of 8 blocks, however many agents read it.
    for figures in record["memory"].values():
        assert figures["document_blocks"] == {"1": 8, "2": 8, "3": 8}
    tokens = {arm: cache["token_bytes"] for arm, cache in record["caches"].items()}
    assert tokens == {"stock": 23040, "polykv": 8280}
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {
        "memory.png",
        "throughput.png",
    }
    again = finished(tmp_path)
    assert again.returncode == 0
    assert "4 of 4 runs are in" in again.stdout


def test_arm_that_cannot_be_served_is_reported(tmp_path: Path) -> None:
    # 8 tokens of cache: vLLM refuses the longest request.
    text = SCENARIO.replace("[stock, polykv]", "[stock]")
    (tmp_path / "tiny.yaml").write_text(text.replace("cache_mib: 64", "cache_mib: 1"))
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "tiny.yaml"), "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert "stock cannot be served" in done.stdout
    assert "KV cache" in done.stdout
    assert (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_interrupted_benchmark_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE) as bench:
        groups: set[int] = set()
        deadline = time.monotonic() + 500
        # Client and server; the engine core is the server's second process.
        while len(groups) < 2 or max(len(group_members(g)) for g in groups) < 2:
            assert time.monotonic() < deadline and bench.poll() is None
            groups |= set(_groups_below(bench.pid))
            time.sleep(0.3)
        bench.send_signal(number)
        bench.wait(60)
    assert bench.returncode == 130
    assert [group for group in groups if group_members(group)] == []


def _groups_below(parent: int) -> list[int]:
    """Return the children of a process that lead a process group."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    leaders = []
    for child in map(int, children):
        try:
            stat = Path(f"/proc/{child}/stat").read_text()
        except OSError:
            continue
        if re.search(rf"\) \S \d+ {child} ", stat) and child != os.getpid():
            leaders.append(child)
    return leaders
