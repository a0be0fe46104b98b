# SPDX-License-Identifier: Apache-2.0
"""What writing blocks to disk costs many agents behind one system prompt."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import _report
from polykv_vllm.bench.agents import AgentsOptions, run_agents
from polykv_vllm.bench.arms import DISK, arm_named
from polykv_vllm.bench.measure import COLD, WARM
from polykv_vllm.bench.results import ResultFolder
from polykv_vllm.bench.scenario import load_scenario
from polykv_vllm.bench.summary import collect

SCENARIO = "disk"
BASE = "polykv"
AT_LEAST = 0.97
"""Part of the throughput without a disk that is required."""

_FIGURES = {
    "output tokens/s": "output_tokens_per_s",
    "decode tokens/s": "decode_tokens_per_s",
}


@dataclass(frozen=True)
class Load:
    """What the agents ask.

    Attributes:
        agents: Requests at once.
        shared_tokens: Of the prompt that all begin with.
        repetitions: Waves of each kind, on each server in turns.
        threads: Compute threads.

    """

    agents: int
    shared_tokens: int
    repetitions: int
    threads: int


def measure(load: Load, folder: Path, startup_timeout_s: float) -> dict[str, Any]:
    """Return for each wave and figure the values of both servers, by repetition.

    Raises:
        RuntimeError: A run failed; the console has said why.

    """
    overrides = {
        "agents": [load.agents],
        "shared_tokens": [load.shared_tokens],
        "repetitions": load.repetitions,
        "threads": load.threads,
    }
    output = folder / "agents"
    options = AgentsOptions(
        SCENARIO, overrides, output, startup_timeout_s=startup_timeout_s
    )
    if not run_agents(options, _report.console):
        raise RuntimeError("the agents' figures cannot be compared")
    scenario = load_scenario(SCENARIO, overrides)
    arms = [arm_named(name) for name in scenario.arms]
    (found,) = collect(scenario, arms, ResultFolder(output)).cases.values()
    return {
        wave: {
            figure: {
                arm: [run[key] for run in getattr(found[arm], wave)]
                for arm in (BASE, DISK)
            }
            for figure, key in _FIGURES.items()
        }
        for wave in (COLD, WARM)
    }


def show(result: dict[str, Any], load: Load) -> None:
    """Print both servers beside each other, and what is required."""
    table = Table(
        title=f"{load.agents} agents over {load.shared_tokens} tokens, "
        f"{load.repetitions} repetitions"
    )
    for heading in (
        "",
        "without disk",
        "with disk",
        "ratio",
        "lowest-highest",
        "at least",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for wave, figures in result.items():
        for figure, by_arm in figures.items():
            base, disk = (statistics.median(by_arm[arm]) for arm in (BASE, DISK))
            pairs = zip(by_arm[DISK], by_arm[BASE], strict=True)
            ratios = [ours / other for ours, other in pairs]
            table.add_row(
                f"{wave}, {figure}",
                f"{base:.1f}",
                f"{disk:.1f}",
                f"{disk / base:.3f}",
                f"{min(ratios):.3f}-{max(ratios):.3f}",
                f"{AT_LEAST}",
            )
    _report.console.print(table)
