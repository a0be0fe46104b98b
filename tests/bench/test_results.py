# SPDX-License-Identifier: Apache-2.0
"""Finished runs are kept, and found again by the next call."""

from pathlib import Path

import pytest
from rich.console import Console

from polykv_vllm.bench.arms import arm_named
from polykv_vllm.bench.errors import BenchError
from polykv_vllm.bench.results import MEMORY, SPEED, ResultFolder, RunKey
from polykv_vllm.bench.run import Runner, jobs_of
from tests.bench.records import ARMS, SCENARIO, fill

KEY = RunKey(SPEED, "stock", "15x3072", 2)


def test_a_saved_run_is_found(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    folder.open(SCENARIO, "tiny", fresh=False)
    assert folder.find(KEY) is None
    folder.save(KEY, {"figures": 1})
    folder.open(SCENARIO, "tiny", fresh=False)
    assert folder.find(KEY) == {"figures": 1}
    assert not list(tmp_path.rglob("*.tmp"))


def test_more_arms_cases_and_repetitions_go_into_the_same_folder(
    tmp_path: Path,
) -> None:
    folder = fill(tmp_path)
    changes = {"arms": ["stock"], "agents": [4], "repetitions": 5}
    folder.open(SCENARIO.model_copy(update=changes), "tiny", fresh=False)
    assert folder.find(KEY) is not None


@pytest.mark.parametrize("update", [{"cache_mib": 512}, {"own_tokens": 7}])
def test_another_scenario_needs_another_folder(
    tmp_path: Path, update: dict[str, int]
) -> None:
    folder = fill(tmp_path)
    other = SCENARIO.model_copy(update=update)
    with pytest.raises(BenchError, match=f"differs in {next(iter(update))}.*--fresh"):
        folder.open(other, "tiny", fresh=False)
    folder.open(other, "tiny", fresh=True)
    assert folder.find(KEY) is None


def test_every_run_has_a_file_of_its_own() -> None:
    names = [job.key.file_name for job in jobs_of(SCENARIO, ARMS)]
    assert len(set(names)) == len(names)
    assert RunKey(MEMORY, "polykv").file_name in names


def test_arms_take_turns_and_each_begins_once() -> None:
    arms = [arm_named(name) for name in ("stock", "polykv-unshared", "polykv")]
    jobs = [job.key for job in jobs_of(SCENARIO, arms) if job.key.case == "1x3072"]
    order = [[k.arm for k in jobs if k.repetition == n] for n in range(3)]
    assert [names[0] for names in order] == [arm.name for arm in arms]
    assert all(sorted(names) == sorted(order[0]) for names in order)


def test_nothing_is_started_when_all_runs_are_there(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    console = Console(record=True)
    # Neither plan nor workload: a server or a client could not even be made.
    runner = Runner(SCENARIO, None, None, folder, console)  # type: ignore[arg-type]
    assert runner.run(ARMS) == []
    assert "40 of 40 runs are in" in console.export_text().replace("\n", " ")
