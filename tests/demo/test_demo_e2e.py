# SPDX-License-Identifier: Apache-2.0
"""The demo itself, with the real server and model."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polykv_vllm.process import group_members

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEMO = [sys.executable, "-m", "polykv_vllm.demo", "--max-tokens", "8"]


def test_demo_measures_what_it_promises() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in done.stdout.splitlines()
        if line.startswith("│")
    ]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["bytes per token"] == ["23,040", "8,280", "2.78x"]
    _, ours, ratio = cells["capacity in tokens"]
    assert int(ours.replace(",", "")) >= 32000
    assert float(ratio.rstrip("x")) >= 2.75
    # Eight prompts whose shared part is 8 full blocks of 128 tokens or more.
    found = int(cells["2"][2].replace(",", ""))
    assert found >= 8 * 8 * 128


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_process(number: signal.Signals) -> None:
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, text=True) as demo:
        group = _server_group(demo.pid)
        # The engine core has started by then: at least two processes.
        deadline = time.monotonic() + 240
        while len(group_members(group)) < 2:
            assert time.monotonic() < deadline and demo.poll() is None
            time.sleep(0.5)
        demo.send_signal(number)
        demo.wait(60)
    assert demo.returncode != 0
    assert group_members(group) == []


def _server_group(parent: int) -> int:
    """Wait for the demo's child that leads a process group, and return its pid."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for child in map(int, children):
            stat = Path(f"/proc/{child}/stat").read_text()
            if re.search(rf"\) \S \d+ {child} ", stat):
                return child
        time.sleep(0.2)
    raise AssertionError("the demo started no server")
