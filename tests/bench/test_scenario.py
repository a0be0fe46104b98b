# SPDX-License-Identifier: Apache-2.0
"""Scenario files: what they say, and what is said about wrong ones."""

from pathlib import Path

import pytest

from polykv_vllm.bench.errors import BenchError
from polykv_vllm.bench.scenario import load_scenario, parse_scenario, shipped

ROOT = Path(__file__).parents[2]
GOOD = "arms: [stock, polykv]\nagents: [15, 1]\nshared_tokens: [3072, 512]\n"


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_scenario_is_valid(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.about
    assert scenario.cases()
    assert scenario.repetitions >= 3


@pytest.mark.parametrize("name", shipped())
def test_every_key_is_explained(name: str) -> None:
    text = (ROOT / "configs" / "bench" / f"{name}.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all("  # " in line or line.startswith("about: ") for line in lines)


def test_cases_are_the_matrix_smallest_first() -> None:
    cases = parse_scenario(GOOD, "x").cases()
    names = ["1x512", "15x512", "1x3072", "15x3072"]
    assert [case.name for case in cases] == names


def test_overrides_replace_keys() -> None:
    scenario = parse_scenario(GOOD, "x", overrides={"model": "m", "arms": ["stock"]})
    assert (scenario.model, scenario.arms) == ("m", ["stock"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "agentz: [1]", ["agentz", "no such key", "shared_tokens"]),
        (GOOD + "distinct: {tokens: 3}", ["distinct.tokens", "document_tokens"]),
        (GOOD + "bars: [{agents: 1}]", ["bars.0.over", "required"]),
        (GOOD.replace("stock", "stok"), ["stok", "stock-fp8", "polykv-unshared"]),
        (GOOD.replace("polykv", "stock"), ["twice"]),
        (GOOD.replace("[15, 1]", "[0]"), ["agents.0", "greater than or equal to 1"]),
        (GOOD + "output_tokens: many", ["output_tokens", "'many'"]),
        (GOOD + "prompts_dir: .", ["either shared_tokens", "prompts_dir"]),
        ("arms: [stock]\nagents: [1]\n", ["either shared_tokens"]),
        (GOOD + "nested: {teams: 2, team_tokens: 512}", ["512", "organisation"]),
        ("- a list", ["must be a mapping"]),
        ("a: [", ["no YAML"]),
    ],
)
def test_errors_name_the_key_and_what_is_possible(text: str, words: list[str]) -> None:
    with pytest.raises(BenchError) as caught:
        parse_scenario(text, "mine.yaml")
    assert "mine.yaml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_unknown_name_lists_the_scenarios() -> None:
    with pytest.raises(BenchError, match=r"'quik'.*decisive.*quick.*\.yaml"):
        load_scenario("quik")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.yaml: No such file"):
        load_scenario(str(tmp_path / "none.yaml"))


def test_prompts_dir_is_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("arms: [stock]\nagents: [2]\nprompts_dir: texts\n")
    scenario = load_scenario(str(path))
    assert scenario.prompts_dir == tmp_path / "texts"
    assert [case.name for case in scenario.cases()] == ["2xprompts"]
