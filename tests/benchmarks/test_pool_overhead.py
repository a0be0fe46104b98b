# SPDX-License-Identifier: Apache-2.0
"""The cost of writing to disk, from results as the agents' benchmark leaves them."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import _pool_overhead, _report
from polykv_vllm.bench.agents import AgentsOptions
from polykv_vllm.bench.arms import arm_named
from polykv_vllm.bench.pool import ServePlan, serve_arguments
from polykv_vllm.bench.scenario import load_scenario
from tests.bench.records import fill

LOAD = _pool_overhead.Load(agents=15, shared_tokens=3072, repetitions=3, threads=1)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(width=140, record=True)
    monkeypatch.setattr(_report, "console", console)
    return console


def test_both_servers_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Console
) -> None:
    def run(options: AgentsOptions, console: Console) -> bool:
        assert options.startup_timeout_s == 700.0
        assert options.output is not None
        fill(options.output, load_scenario(options.scenario, options.overrides))
        return True

    monkeypatch.setattr(_pool_overhead, "run_agents", run)
    result = _pool_overhead.measure(LOAD, tmp_path, 700.0)
    decode = result["cold"]["decode tokens/s"]
    assert {arm: len(values) for arm, values in decode.items()} == {
        "polykv": 3,
        "polykv-disk": 3,
    }
    _pool_overhead.show(result, LOAD)
    text = printed.export_text()
    assert text.count("0.938") == 3 * 4  # 150 of 160 tokens a second, everywhere
    assert "0.97" in text


def test_failed_runs_are_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any) -> bool:
        return False

    monkeypatch.setattr(_pool_overhead, "run_agents", run)
    with pytest.raises(RuntimeError, match="cannot be compared"):
        _pool_overhead.measure(LOAD, tmp_path, 700.0)


def test_the_disk_of_the_arm_is_in_the_benchmarks_folder(tmp_path: Path) -> None:
    scenario = load_scenario(_pool_overhead.SCENARIO)
    cpus: Any = None
    plan = ServePlan("m", 4096, cpus, {}, tmp_path)
    disk = serve_arguments(scenario, arm_named("polykv-disk"), plan)
    base = serve_arguments(scenario, arm_named("polykv"), plan)
    assert [word for word in disk if word not in base] == [
        "--additional-config",
        f'{{"polykv": {{"pool": {{"path": "{tmp_path}/pool"}}}}}}',
    ]
