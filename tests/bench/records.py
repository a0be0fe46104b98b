# SPDX-License-Identifier: Apache-2.0
"""Result folders as the benchmark writes them, without an engine."""

from pathlib import Path
from typing import Any

from polykv_vllm.bench.arms import arm_named
from polykv_vllm.bench.results import DISTINCT, MEMORY, SPEED, ResultFolder, RunKey
from polykv_vllm.bench.scenario import Scenario

SCENARIO = Scenario(
    model="tiny",
    arms=["stock", "polykv-unshared", "polykv", "bound"],
    agents=[1, 15, 64],
    shared_tokens=[3072],
    output_tokens=64,
    cache_mib=256,
    memory_figure={"agents": 15, "shared_tokens": 3072},
    distinct={"document_tokens": 2048, "at_least": 2.7},
    bars=[{"agents": 15, "shared_tokens": 3072, "over": "stock", "at_least": 1.5}],
)
BLOCKS = {"stock": (91, 23040), "polykv-unshared": (253, 8280)}
RATES = {"stock": 100.0, "polykv-unshared": 120.0, "polykv": 160.0, "bound": 200.0}


def environment(**changes: Any) -> dict[str, Any]:
    return {
        "cpu": "a CPU",
        "cpu_flags": ["avx2"],
        "cpus": 2,
        "load_1min": 0.5,
        "threads": 1,
        "versions": {"vllm": "0.32.0"},
        "commit": "abc1234",
        **changes,
    }


def phase(agents: int, decode: float, **changes: Any) -> dict[str, Any]:
    return {
        "agents": agents,
        "requested_output_tokens": 64 * agents,
        "output_tokens": 64 * agents,
        "output_tokens_per_s": 0.8 * decode,
        "decode_tokens_per_s": decode,
        "ttft_ms": 400.0,
        "ttft_max_ms": 500.0,
        "itl_ms": {"p50": 100.0, "p90": 120.0, "p99": 150.0},
        "tpot_ms": {"p50": 101.0, "p90": 110.0, "p99": 115.0},
        "prompt_tokens": 3136 * agents,
        "hit_tokens": 3072 * agents,
        "preemptions": 0,
        "shared_rate": None,
        **changes,
    }


def record(arm: str, figures: Any, **changes: Any) -> dict[str, Any]:
    blocks, token_bytes = BLOCKS.get(arm, BLOCKS["polykv-unshared"])
    return {
        "figures": figures,
        "cache": {
            "capacity_tokens": blocks * 128,
            "memory_bytes": 256 << 20,
            "block_size": 128,
            "num_blocks": blocks,
            "token_bytes": token_bytes,
        },
        "environment": environment(),
        "serve_command": ["vllm", "serve", "tiny"],
        **changes,
    }


def fill(path: Path, scenario: Scenario = SCENARIO) -> ResultFolder:
    """Write every run of a scenario."""
    folder = ResultFolder(path)
    folder.open(scenario, "tiny", fresh=False)
    for case in scenario.cases():
        for arm in scenario.arms:
            for repetition in range(scenario.repetitions):
                rate = RATES.get(arm, 150.0) * case.agents**0.5 * (1 + repetition / 50)
                figures = {p: phase(case.agents, rate) for p in ("cold", "warm")}
                key = RunKey(SPEED, arm, case.name, repetition)
                folder.save(key, record(arm, figures))
    for arm in ("stock", "polykv"):
        blocks = {str(n): 24 for n in range(1, 16)}
        figures = {"shared_tokens": 3072, "document_blocks": blocks}
        folder.save(RunKey(MEMORY, arm), record(arm, figures))
        count = {"stock": 5, "polykv": 14}[arm]
        figures = {"document_tokens": 2048, "computed": count, "measured": count}
        folder.save(RunKey(DISTINCT, arm), record(arm, figures))
    return folder


ARMS = [arm_named(name) for name in SCENARIO.arms]
