# SPDX-License-Identifier: Apache-2.0
"""All results of a scenario, put together and judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polykv_vllm.bench.arms import BOUND, Arm
from polykv_vllm.bench.figures import (
    Spread,
    median_of,
    prefixes_per_gib,
    share_of_possible,
)
from polykv_vllm.bench.measure import COLD, WARM
from polykv_vllm.bench.results import DISTINCT, MEMORY, SPEED, ResultFolder, RunKey
from polykv_vllm.bench.scenario import Scenario

PhaseRecord = Mapping[str, Any]


@dataclass(frozen=True)
class CaseArm:
    """One arm's repetitions of one case.

    Attributes:
        agents: Of the case.
        shared_tokens: Of the case; None for real prompts.
        arm: The arm.
        cold: Figures of the cold wave, one mapping for each repetition.
        warm: Of the warm wave.

    """

    agents: int
    shared_tokens: int | None
    arm: Arm
    cold: list[PhaseRecord]
    warm: list[PhaseRecord]

    def spread(self, phase: str, figure: str) -> Spread:
        """Return median and range of a figure that is one number."""
        return Spread.of([run[figure] for run in getattr(self, phase)])

    def percentiles(self, phase: str, figure: str) -> dict[str, float]:
        """Return the medians of a figure that has percentiles."""
        return median_of([run[figure] for run in getattr(self, phase)])

    def hit_rate(self, phase: str) -> float:
        """Return the share of prompt tokens found in the prefix cache."""
        runs = getattr(self, phase)
        queried = sum(run["prompt_tokens"] for run in runs)
        return sum(run["hit_tokens"] for run in runs) / queried if queried else 0.0

    def shared_rate(self) -> float | None:
        """Return the share of warm attention that served several agents at once."""
        rates = [run.get("shared_rate") for run in self.warm]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else None

    @property
    def decode(self) -> float:
        """Median decode throughput of the warm wave, tokens per second."""
        return self.spread(WARM, "decode_tokens_per_s").median


@dataclass
class Summary:
    """Everything that a report shows.

    Attributes:
        scenario: What was asked for.
        cases: {case: {arm: repetitions}}, in the scenario's order; arms without a
            finished run are missing.
        caches: {arm: what the engine said about its cache}.
        memory: {arm: figures of `Bench.memory`}.
        distinct: {arm: figures of `Bench.distinct`}.
        environments: Of each finished run.
        problems: Why these results must not be used; empty if they may.
        notes: What a reader should know.
        commands: {arm: the command that serves it}.

    """

    scenario: Scenario
    cases: dict[str, dict[str, CaseArm]] = field(default_factory=dict)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    distinct: dict[str, dict[str, Any]] = field(default_factory=dict)
    environments: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    commands: dict[str, list[str]] = field(default_factory=dict)

    def ratio(self, case: str, arm: str, over: str) -> float | None:
        """Return decode throughput of `arm` over that of `over`, if both ran."""
        arms = self.cases.get(case, {})
        if arm not in arms or over not in arms:
            return None
        return arms[arm].decode / arms[over].decode

    def possible(self, case: str, arm: str, over: str) -> float | None:
        """Return which part of the time for attention in `over` is saved in `arm`."""
        arms = self.cases.get(case, {})
        if not {arm, over, BOUND} <= set(arms):
            return None
        return share_of_possible(
            arms[over].decode, arms[arm].decode, arms[BOUND].decode
        )

    def distinct_ratio(self, arm: str) -> float | None:
        """Return how many times stock's agents with own documents an arm runs."""
        if not {arm, "stock"} <= set(self.distinct):
            return None
        ours, stock = (self.distinct[n]["measured"] for n in (arm, "stock"))
        return ours / stock if stock else None

    def resident_prefixes(self, arm: str, shared_tokens: int) -> int:
        """Return how many prompts of `shared_tokens` stay in one GiB of cache."""
        cache = self.caches[arm]
        return prefixes_per_gib(
            cache["token_bytes"], cache["block_size"], shared_tokens
        )

    def document_bytes(self, arm: str) -> dict[int, float]:
        """Return the measured memory of the shared document by number of agents."""
        figures, cache = self.memory[arm], self.caches[arm]
        block_bytes = cache["token_bytes"] * cache["block_size"]
        return {
            int(n): blocks * block_bytes
            for n, blocks in figures["document_blocks"].items()
        }


def collect(scenario: Scenario, arms: list[Arm], folder: ResultFolder) -> Summary:
    """Read all finished runs of `arms` from the folder and judge them."""
    summary = Summary(scenario)
    for case in scenario.cases():
        rows = summary.cases.setdefault(case.name, {})
        for arm in arms:
            runs = []
            for repetition in range(scenario.repetitions):
                key = RunKey(SPEED, arm.name, case.name, repetition)
                if (record := _find(summary, folder, key)) is not None:
                    runs.append(record["figures"])
            if runs:
                cold, warm = [r[COLD] for r in runs], [r[WARM] for r in runs]
                rows[arm.name] = CaseArm(
                    case.agents, case.shared_tokens, arm, cold, warm
                )
    for arm in arms:
        for kind, found in ((MEMORY, summary.memory), (DISTINCT, summary.distinct)):
            record = _find(summary, folder, RunKey(kind, arm.name))
            if record is not None:
                found[arm.name] = record["figures"]
    judge(summary)
    return summary


def _find(summary: Summary, folder: ResultFolder, key: RunKey) -> dict[str, Any] | None:
    record = folder.find(key)
    if record is not None:
        summary.caches[key.arm] = record["cache"]
        summary.environments.append(record["environment"])
        summary.commands[key.arm] = record["serve_command"]
    return record


def judge(summary: Summary) -> None:
    """Add problems and notes to a summary."""
    for name, arms in summary.cases.items():
        for row in arms.values():
            for phase in (COLD, WARM):
                _check_tokens(summary, name, row, phase)
        _check_hits(summary, name, list(arms.values()))
    commits = {e["commit"] for e in summary.environments}
    if len(commits) > 1:
        summary.notes.append(
            f"the runs are of several commits ({', '.join(sorted(commits))}): --fresh "
            "measures all of them anew"
        )
    busy = [e for e in summary.environments if e["load_1min"] > e["cpus"] + 0.5]
    if busy:
        summary.notes.append(
            f"{len(busy)} of {len(summary.environments)} runs began on a busy machine "
            "(more work than CPUs): take these figures as a trial"
        )


def _check_tokens(summary: Summary, case: str, row: CaseArm, phase: str) -> None:
    for number, run in enumerate(getattr(row, phase), start=1):
        asked, came = run["requested_output_tokens"], run["output_tokens"]
        if came != asked or run["agents"] != row.agents:
            summary.problems.append(
                f"{case}, {row.arm.name}, repetition {number}, {phase}: {came:,} "
                f"output tokens of {run['agents']} agents came, {asked:,} of "
                f"{row.agents} were asked for"
            )
        if run["preemptions"]:
            summary.notes.append(
                f"{case}, {row.arm.name}, repetition {number}, {phase}: "
                f"{run['preemptions']} preemptions"
            )


def _check_hits(summary: Summary, case: str, rows: list[CaseArm]) -> None:
    """Compare warm hits of all arms; cold ones depend on the order of arrival."""
    block_size = summary.scenario.block_size
    for number in range(summary.scenario.repetitions):
        hits = {
            row.arm.name: row.warm[number]["hit_tokens"]
            for row in rows
            if number < len(row.warm)
        }
        if not hits:
            continue
        agents = rows[0].agents
        if max(hits.values()) - min(hits.values()) > agents * block_size:
            each = ", ".join(f"{arm} {count:,}" for arm, count in hits.items())
            summary.problems.append(
                f"{case}, repetition {number + 1}: the arms found different numbers of "
                f"prompt tokens in their prefix caches ({each}), more than the "
                f"rounding to blocks of {block_size} explains"
            )
