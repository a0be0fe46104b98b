# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario: every arm, every case, in turns; then the report."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from polykv_vllm.bench.arms import UNSHARED, Arm, arm_named, cpu_has_amx
from polykv_vllm.bench.client import BenchClient
from polykv_vllm.bench.errors import ArmError, BenchError, RunError
from polykv_vllm.bench.figures import token_bytes
from polykv_vllm.bench.measure import Bench
from polykv_vllm.bench.pool import ServePlan, ServerPool
from polykv_vllm.bench.results import DISTINCT, MEMORY, SPEED, ResultFolder, RunKey
from polykv_vllm.bench.scenario import Case, Scenario
from polykv_vllm.bench.workload import Workload
from polykv_vllm.process import signals_unwind
from polykv_vllm.reporting import environment
from polykv_vllm.reporting.progress import RunProgress
from polykv_vllm.scrape import CacheReport, cache_report
from polykv_vllm.server import ServerError, VllmServer

_REPORT_LINES = 2  # of a failure: what failed and why; the rest is the log's end
_MAX_TROUBLES = 2  # an arm whose server died this often is left alone


@dataclass(frozen=True)
class Job:
    """One run that is to be done: its key and what does it."""

    key: RunKey
    arm: Arm
    case: Case | None = None


def jobs_of(scenario: Scenario, arms: list[Arm]) -> Iterator[Job]:
    """Yield all runs of a scenario in order.

    Within a case and repetition all arms take turns, and each repetition starts with
    another one.
    """
    for case in scenario.cases():
        for repetition in range(scenario.repetitions):
            first = repetition % len(arms)
            for arm in arms[first:] + arms[:first]:
                yield Job(RunKey(SPEED, arm.name, case.name, repetition), arm, case)
    for arm in filter(holds_its_own_bytes, arms):
        if scenario.memory_figure is not None:
            yield Job(RunKey(MEMORY, arm.name), arm)
        if scenario.distinct is not None:
            yield Job(RunKey(DISTINCT, arm.name), arm)


def holds_its_own_bytes(arm: Arm) -> bool:
    """Whether an arm's memory can differ from that of the arms beside it."""
    return not (arm.is_bound or arm.needs_amx or arm.name.endswith(UNSHARED))


def usable_arms(scenario: Scenario, console: Console) -> list[Arm]:
    """Return the scenario's arms but those that would repeat another on this CPU."""
    arms = [arm_named(name) for name in scenario.arms]
    if not cpu_has_amx():
        for arm in (arm for arm in arms if arm.needs_amx):
            console.print(f"[dim]{arm.name}: this CPU has no AMX, stock is the same[/]")
        arms = [arm for arm in arms if not arm.needs_amx]
    if not arms:
        raise BenchError("no arm is left to run")
    return arms


@dataclass
class Runner:
    """Does the jobs that the folder does not have yet."""

    scenario: Scenario
    plan: ServePlan
    workload: Workload
    folder: ResultFolder
    console: Console
    failures: list[str] = field(default_factory=list)
    _troubles: Counter[str] = field(default_factory=Counter)

    def run(self, arms: list[Arm]) -> list[str]:
        """Do all jobs; return messages about those that failed.

        What fails does not keep the rest from going on.
        """
        jobs = list(jobs_of(self.scenario, arms))
        todo = [job for job in jobs if self.folder.find(job.key) is None]
        if len(todo) < len(jobs):
            self.console.print(
                f"{len(jobs) - len(todo)} of {len(jobs)} runs are in "
                f"{self.folder.path} already (--fresh measures them again)",
                highlight=False,
            )
        if todo:
            self._do(todo)
        return self.failures

    def _do(self, jobs: list[Job]) -> None:
        cpus = self.plan.cpus
        with ExitStack() as stack:
            stack.enter_context(signals_unwind())
            stack.enter_context(_on_cpus(cpus.service))
            folder = self.plan.folder / "client"
            client = stack.enter_context(BenchClient(folder, cpus.service))
            bench = Bench(self.scenario, self.workload, client)
            pool = ServerPool(self.scenario, self.plan, bench.warm_up)
            stack.enter_context(pool)
            progress = stack.enter_context(RunProgress(self.console, len(jobs)))
            for job in jobs:
                progress.start(str(job.key))
                if self._troubles[job.arm.name] < _MAX_TROUBLES:
                    self._attempt(job, pool, bench, progress)
                progress.done()

    def _attempt(
        self, job: Job, pool: ServerPool, bench: Bench, progress: RunProgress
    ) -> None:
        try:
            with pool.serving(job.arm, progress.stage) as server:
                progress.stage("measuring")
                record = self._measure(job, server, bench)
        except ArmError as error:
            self._troubles[job.arm.name] = _MAX_TROUBLES
            self._note(f"{job.arm.name} cannot be served, it is left out: {error}")
        except (ServerError, RunError) as error:
            self._troubles[job.arm.name] += isinstance(error, ServerError)
            self._note(f"{job.key}: {error}")
        else:
            record["serve_command"] = pool.command(job.arm)
            self.folder.save(job.key, record)

    def _measure(self, job: Job, server: VllmServer, bench: Bench) -> dict[str, Any]:
        started = environment.describe(self.scenario.threads)
        if job.key.kind == MEMORY:
            figures = bench.memory(server)
        elif job.key.kind == DISTINCT:
            figures = bench.distinct(server)
        else:
            assert job.case is not None
            figures = bench.speed(server, job.case, job.key.repetition)
        return {
            **asdict(job.key),
            "figures": figures,
            "cache": self._cache_facts(job.arm, cache_report(server.metrics())),
            "environment": started,
        }

    def _cache_facts(self, arm: Arm, report: CacheReport) -> dict[str, Any]:
        expected = self.plan.token_bytes.get(arm.name, 0)
        return {**asdict(report), "token_bytes": token_bytes(report, expected)}

    def _note(self, message: str) -> None:
        """Print a failure in full, and keep its first lines for the report."""
        self.failures.append("\n".join(message.splitlines()[:_REPORT_LINES]))
        self.console.print(f"[red]✗[/] {escape(message)}", highlight=False)


@contextmanager
def _on_cpus(cpus: tuple[int, ...]) -> Iterator[None]:
    """Keep this process on `cpus`, so that it takes none of the engine's time."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
