# SPDX-License-Identifier: Apache-2.0
"""Compute threads have their CPUs for themselves."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from polykv_vllm.bench.cpus import CpuPlan, keep_off_compute, plan_cpus

CPUS = sorted(os.sched_getaffinity(0))


def test_the_last_cpus_compute() -> None:
    plan = plan_cpus(1)
    assert plan.compute == (CPUS[-1],)
    assert plan.environment == {"VLLM_CPU_OMP_THREADS_BIND": str(CPUS[-1])}
    assert plan.all == tuple(CPUS)
    if len(CPUS) > 1:
        assert plan.is_apart and plan.service == tuple(CPUS[:-1])


def test_all_cpus_computing_is_not_apart() -> None:
    plan = plan_cpus(len(CPUS))
    assert not plan.is_apart and plan.service == tuple(CPUS)


def test_too_many_threads() -> None:
    with pytest.raises(ValueError, match=f"{len(CPUS) + 1} compute threads"):
        plan_cpus(len(CPUS) + 1)


@pytest.fixture
def group() -> Iterator[list[int]]:
    """Yield a process group: its leader, and a worker that has bound itself."""
    bind = f"import os, time; os.sched_setaffinity(0, [{CPUS[-1]}]); time.sleep(60)"
    leader = (
        "import subprocess, sys, time; "
        f"print(subprocess.Popen([sys.executable, '-c', {bind!r}]).pid, flush=True); "
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", leader]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        yield [process.pid, int(process.stdout.readline())]
        os.killpg(process.pid, 9)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_all_but_the_worker_move_away(group: list[int]) -> None:
    leader, worker = group
    deadline = time.monotonic() + 20
    while os.sched_getaffinity(worker) != {CPUS[-1]}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    keep_off_compute(leader, CpuPlan((CPUS[-1],), tuple(CPUS[:-1])))
    assert os.sched_getaffinity(leader) == set(CPUS[:-1])
    assert os.sched_getaffinity(worker) == {CPUS[-1]}
