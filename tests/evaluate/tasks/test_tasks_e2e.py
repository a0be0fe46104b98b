# SPDX-License-Identifier: Apache-2.0
"""Tasks and the shared document on the real engine."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.capacity import load_config
from polykv_vllm.evaluate.arms import Arm, parse_arm
from polykv_vllm.evaluate.document import DocumentSuite
from polykv_vllm.evaluate.options import DocumentOptions, SuiteOptions, TaskOptions
from polykv_vllm.evaluate.results import RunStore
from polykv_vllm.evaluate.setup import EngineSetup, bytes_per_token
from polykv_vllm.evaluate.suite import Suite
from polykv_vllm.evaluate.tasks import (
    Gsm8kSuite,
    JsonlSuite,
    KeyValueSuite,
    NeedleSuite,
)
from polykv_vllm.evaluate.tasks.questions import QUESTIONS_FILE, SHOTS_FILE
from polykv_vllm.evaluate.tasks.retrieval import KV_FILE
from polykv_vllm.evaluate.text import load_tokenizer
from polykv_vllm.models import resolve_model

pytest.importorskip("sacrebleu")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
SUITES = (NeedleSuite, KeyValueSuite, Gsm8kSuite, JsonlSuite, DocumentSuite)
ARMS = ("bf16", "polykv_k8v8")


@dataclass
class Runs:
    """What both arms did, and what a second, resumed run of bf16 asked."""

    records: dict[str, dict[str, Any]]
    resumed: dict[str, Any]
    asked_again: list[int]


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def sum_of(n: int) -> dict[str, str]:
    return {
        "question": f"What is {n} and 1?",
        "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}",
    }


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> SuiteOptions:
    folder = tmp_path_factory.mktemp("data")
    write(folder / SHOTS_FILE, [sum_of(n) for n in range(2, 9)])
    write(folder / QUESTIONS_FILE, [sum_of(n) for n in (11, 15, 23)])
    pairs = [[f"key-{n}", f"value-{n * n}"] for n in range(8)]
    record = {"ordered_kv_records": pairs, "key": "key-5", "value": "value-25"}
    write(folder / KV_FILE, [record])
    write(
        folder / "own.jsonl",
        [
            {"prompt": "Say yes.", "answer": "yes"},
            {"prompt": "x " * 3000, "answer": "y"},
        ],
    )
    return SuiteOptions(
        tasks=TaskOptions(
            data=folder,
            items=2,
            needle_tokens=300,
            needle_depths=(0.0, 0.5),
            haystack=ROOT / "LICENSE",
            shots=7,
            file=folder / "own.jsonl",
            answer_tokens=24,
        ),
        document=DocumentOptions(
            document=ROOT / "LICENSE",
            tokens=400,
            documents=2,
            agents=(1, 3),
            answer_tokens=16,
        ),
    )


@pytest.fixture(scope="module")
def runs(options: SuiteOptions, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    model = resolve_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer(model)
    suites: list[Suite] = [suite.from_options(options) for suite in SUITES]
    demand = suites[0].prepare(tokenizer, 2048)
    for suite in suites[1:]:
        demand |= suite.prepare(tokenizer, 2048)
    store = RunStore(tmp_path_factory.mktemp("run"))
    store.open({"suites": {suite.name: suite.settings() for suite in suites}})
    setup = EngineSetup(model, tokenizer, 2048, demand, store.states, store.logs, 1)
    records: dict[str, dict[str, Any]] = {suite.name: {} for suite in suites}
    found = Runs(records, {}, [])
    for name in ARMS:
        arm = parse_arm(name)
        with closing(_engine(setup, arm)) as engine:
            for suite in suites:
                figures = suite.run(engine, arm, store, lambda done, total: None)
                records[suite.name][name] = _record(suite, arm, engine, figures)
            if arm.is_reference:
                found.resumed = _resume(
                    suites[0], engine, arm, store, found.asked_again
                )
    return found


def _engine(setup: EngineSetup, arm: Arm) -> Any:
    from polykv_vllm.evaluate.vllm_engine import VllmEngine

    return VllmEngine(setup, arm, bytes_per_token(load_config(setup.model), arm))


def _record(suite: Suite, arm: Arm, engine: Any, figures: dict) -> dict[str, Any]:
    return {
        "figures": json.loads(json.dumps(figures)),
        "suite": suite.name,
        "arm": arm.name,
        "settings": suite.settings(),
        "bytes_per_token": engine.bytes_per_token,
    }


def _resume(
    suite: Suite, engine: Any, arm: Arm, store: RunStore, done_at: list[int]
) -> dict[str, Any]:
    """Run a suite again whose log lost its last item."""
    path = store.items(arm.name, suite.name).path
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    progress: Callable[[int, int], None] = lambda done, total: done_at.append(done)  # noqa: E731
    return suite.run(engine, arm, store, progress)


def figures_of(runs: Runs, suite: str) -> Iterator[dict[str, Any]]:
    for arm in ARMS:
        yield runs.records[suite][arm]["figures"]


def test_a_needle_is_found_with_either_cache(runs: Runs) -> None:
    for figures in figures_of(runs, "needle"):
        assert figures["correct"] == figures["scored"] == figures["asked"] == 2
        assert list(figures["groups"]) == ["depth   0 %", "depth  50 %"]


def test_a_run_goes_on_where_it_stopped(runs: Runs) -> None:
    assert runs.asked_again == [1, 2]
    first = runs.records["needle"]["bf16"]["figures"]["items"]
    again = runs.resumed["items"]
    assert list(again) == list(first)
    assert all(again[key]["answer"] == first[key]["answer"] for key in first)


def test_the_examples_are_read_from_the_cache(runs: Runs) -> None:
    for figures in figures_of(runs, "gsm8k"):
        blocks = figures["prefix_tokens"] // 128 * 128
        assert blocks >= 128
        assert figures["cached_tokens"] == 2 * blocks
        for item in figures["items"].values():
            assert item["cached_tokens"] == blocks


def test_answers_have_a_likelihood_near_the_references(runs: Runs) -> None:
    bf16, ours = figures_of(runs, "kv_retrieval")
    assert (bf16["asked"], bf16["scored"]) == (2, 1)
    assert "answer_kld" not in bf16
    assert 0 < ours["answer_kld"]["value"] < 0.05
    # The KLD bounds how far the likelihood of any outcome can be off on average.
    assert ours["answer_nll"]["value"] == pytest.approx(
        bf16["answer_nll"]["value"], abs=0.2
    )


def test_what_does_not_fit_is_left_out_and_counted(runs: Runs) -> None:
    for figures in figures_of(runs, "jsonl"):
        assert (figures["scored"], figures["too_long"]) == (1, ["0002"])
    report = JsonlSuite.report(runs.records["jsonl"])
    assert any("1 items scored of 2 asked; 1 longer" in note for note in report.notes)


def test_the_rest_of_a_document_is_predicted_from_the_cache(runs: Runs) -> None:
    bf16, ours = figures_of(runs, "document")
    # Of 400 tokens 256 are whole blocks of 70 %; the first token after them is lost.
    assert bf16["continuations"]["tokens"] == 2 * (400 - 256 - 1)
    assert ours["continuations"]["documents"] == 2
    assert abs(ours["continuations"]["ppl_change"]["value"]) < 0.03
    assert 0 < ours["continuations"]["kld"]["value"] < 0.02


def test_agents_read_one_document(runs: Runs) -> None:
    for figures in figures_of(runs, "document"):
        assert figures["shared_tokens"] >= 384
        for agents, run in figures["agents"].items():
            assert run["answers"] == int(agents)
            assert run["cached_tokens"] >= int(agents) * figures["shared_tokens"]
    *_, memory = DocumentSuite.report(runs.records["document"]).tables
    assert [row[0] for row in memory.rows] == list(ARMS)
    assert float(memory.rows[1][3].split("x")[0]) == pytest.approx(1.94, abs=0.02)
