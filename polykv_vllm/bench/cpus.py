# SPDX-License-Identifier: Apache-2.0
"""Which CPU does what: nothing but the engine's compute threads runs on theirs."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from polykv_vllm.process import group_members


@dataclass(frozen=True)
class CpuPlan:
    """A split of this process's CPUs.

    Attributes:
        compute: One compute thread of the engine on each.
        service: For the API server, the scheduler, the client and this process; the
            compute CPUs again where there are no others.

    """

    compute: tuple[int, ...]
    service: tuple[int, ...]

    @property
    def is_apart(self) -> bool:
        """Whether the client cannot disturb the compute threads."""
        return not set(self.compute) & set(self.service)

    @property
    def all(self) -> tuple[int, ...]:
        """Every CPU of the plan."""
        return tuple(sorted({*self.compute, *self.service}))

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which vLLM's CPU worker takes its CPUs."""
        return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.compute))}


def plan_cpus(threads: int) -> CpuPlan:
    """Give the last `threads` CPUs to the engine and the rest to everything else.

    Raises:
        ValueError: This process may use fewer CPUs than `threads`.

    """
    cpus = sorted(os.sched_getaffinity(0))
    if threads > len(cpus):
        raise ValueError(f"{threads} compute threads on {len(cpus)} CPU(s)")
    return CpuPlan(tuple(cpus[-threads:]), tuple(cpus[:-threads] or cpus))


def keep_off_compute(process_group: int, plan: CpuPlan) -> None:
    """Move all processes of a started server but its workers to the service CPUs.

    A worker is told by its threads: vLLM has bound them to compute CPUs.
    """
    if not plan.is_apart:
        return
    for pid in group_members(process_group):
        threads = [int(entry.name) for entry in _threads(pid)]
        allowed = [cpus for thread in threads if (cpus := _affinity(thread))]
        if any(cpus <= set(plan.compute) for cpus in allowed):
            continue
        for thread in threads:
            with contextlib.suppress(OSError):  # it may have ended
                os.sched_setaffinity(thread, plan.service)


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _affinity(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except OSError:
        return set()
