# SPDX-License-Identifier: Apache-2.0
"""Prompts: exact lengths, shared exactly where the scenario says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.bench.errors import BenchError
from polykv_vllm.bench.scenario import Case, Scenario
from polykv_vllm.bench.workload import (
    Workload,
    needed_blocks,
    read_prompts,
    write_dataset,
)

CASE = Case(6, 512)


def scenario(**keys: Any) -> Scenario:
    return Scenario(arms=["stock"], agents=[6], shared_tokens=[512], **keys)


def shared_length(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(first))


def test_agents_share_all_but_their_own_tokens() -> None:
    prompts = Workload(scenario(), 49152, []).prompts(CASE, "cold", 0)
    assert {len(prompt) for prompt in prompts} == {512 + 64}
    assert all(shared_length(prompts[0], p) == 512 for p in prompts[1:])


def test_own_tokens_are_new_in_each_phase_and_repetition() -> None:
    workload = Workload(scenario(), 49152, [])
    waves = [
        workload.prompts(CASE, phase, n) for phase in ("cold", "warm") for n in (0, 1)
    ]
    firsts = [wave[0] for wave in waves]
    assert all(shared_length(firsts[0], other) == 512 for other in firsts[1:])
    assert waves[0] == Workload(scenario(), 49152, []).prompts(CASE, "cold", 0)


def test_groups_have_nothing_in_common() -> None:
    prompts = Workload(scenario(groups=2), 49152, []).prompts(CASE, "cold", 0)
    assert shared_length(prompts[0], prompts[1]) == 0
    assert shared_length(prompts[0], prompts[2]) == 512


def test_teams_share_the_organisation() -> None:
    nested = {"teams": 3, "team_tokens": 128}
    prompts = Workload(scenario(nested=nested), 49152, []).prompts(CASE, "cold", 0)
    assert {len(prompt) for prompt in prompts} == {512 + 64}
    assert shared_length(prompts[0], prompts[1]) == 384
    assert shared_length(prompts[0], prompts[3]) == 512


def test_ids_stay_in_a_small_vocabulary() -> None:
    prompts = Workload(scenario(), 300, []).prompts(CASE, "cold", 0)
    assert max(map(max, prompts)) < 300


@pytest.mark.parametrize(
    ("keys", "blocks"),
    # 512 shared tokens are 4 blocks; 64 own and 64 new ones are 1 for each agent.
    [({}, 4 + 6), ({"groups": 2}, 2 * 4 + 6), ({"output_tokens": 65}, 4 + 2 * 6)],
)
def test_needed_blocks(keys: dict[str, int], blocks: int) -> None:
    workload = Workload(scenario(**keys), 49152, [])
    assert needed_blocks(workload, CASE, scenario(**keys)) == blocks


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str) -> Any:
        return type("Encoding", (), {"input_ids": list(map(ord, text))})


def test_prompts_come_from_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about the files")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md").write_text("two")
    lines = [
        {"system": "three", "team": "x"},
        {"messages": [{"role": "system", "content": "four"}]},
        {"unrelated": 1},
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = ["".join(map(chr, p)) for p in read_prompts(tmp_path, Letters())]
    assert texts == ["one", "two", "three", "four"]


def test_folders_without_prompts_are_errors(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"has no prompt.*\.txt.*jsonl"):
        read_prompts(tmp_path, Letters())
    with pytest.raises(BenchError, match="is not a directory"):
        read_prompts(tmp_path / "none", Letters())
    (tmp_path / "bad.jsonl").write_text('{"system": ')
    with pytest.raises(BenchError, match=r"bad\.jsonl:1"):
        read_prompts(tmp_path, Letters())


def test_vllm_reads_the_dataset_as_token_ids(tmp_path: Path) -> None:
    from vllm.benchmarks.datasets import CustomDataset

    path = tmp_path / "prompts.jsonl"
    write_dataset(path, [[5, 6, 7], [8]])
    dataset = CustomDataset(dataset_path=str(path), disable_shuffle=True, random_seed=0)
    requests = dataset.sample(tokenizer=None, num_requests=2)
    assert [request.prompt for request in requests] == [[5, 6, 7], [8]]
