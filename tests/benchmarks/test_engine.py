# SPDX-License-Identifier: Apache-2.0
"""The engine benchmark: its arms and tables, and one arm on the real engine."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import engine
from benchmarks._engine_rounds import Rounds, request, store_share
from benchmarks._engine_session import EngineError, engine_session


class Stub:
    """A session's facts."""

    def __init__(self, capacity: int) -> None:
        self.facts = {"capacity_tokens": capacity, "attention": "x"}


def text_of(table: Any) -> str:
    console = Console(width=200, record=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_arms_differ_in_what_is_compared_only() -> None:
    shared = engine.llm_options("model", 1 << 20, eager=True)
    arms = engine.arm_options(shared, "polykv_k7v4", without_amx=True)
    assert list(arms) == ["stock", "stock, no AMX", "polykv_k7v4"]
    dtypes = [arm.pop("kv_cache_dtype") for arm in arms.values()]
    workers = [arm.pop("worker_extension_cls") for arm in arms.values()]
    assert dtypes == ["auto", "auto", "polykv_k7v4"]
    assert workers[0] == workers[2] != workers[1]
    assert arms["stock"] == arms["polykv_k7v4"]
    assert "stock, no AMX" not in engine.arm_options(shared, "polykv", False)


def test_ratios_are_ours_over_theirs() -> None:
    results = {"stock": Rounds([3.0], [10.0]), "polykv": Rounds([2.0], [25.0])}
    sessions: Any = {"stock": Stub(1000), "polykv": Stub(2800)}
    text = text_of(engine.speed_table(results, sessions, "polykv"))
    for expected in ("1.50x", "2.50x", "2.80x"):
        assert expected in text


def test_memory_growth_is_from_the_shortest_to_the_longest() -> None:
    peaks = {2048: 100 << 20, 4096: 130 << 20, 8000: 110 << 20}
    assert engine.memory_growth(peaks) == 10 << 20
    assert "+10.0" in text_of(engine.memory_table({"polykv": peaks}))


def test_an_engine_that_does_not_start_shows_its_log() -> None:
    pytest.importorskip("vllm")
    options = {"model": "/nonexistent/model"}
    session = engine_session("broken", options, threads=1)
    with pytest.raises(EngineError, match="nonexistent"), session:
        pass


@pytest.mark.e2e
def test_one_arm_on_the_real_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from polykv_vllm.models import build_model

    model = str(build_model("smollm2-135m-instruct"))
    options = engine.llm_options(model, 128 << 20, eager=True)
    arm = engine.arm_options(options, "polykv", without_amx=False)["polykv"]
    with engine_session("polykv", arm, threads=1) as session:
        assert session.facts["attention"].startswith("polykv_vllm ")
        times = request(session, list(range(1000, 1300)), 4)
        assert times["prefill_s"] > 0 and times["decode_s"] > 0
        assert times["tokens"] == 4
        assert 0 < store_share(session, 256, rounds=1)["share"] < 1
        # The cache is one buffer that all layers share, and it is touched once.
        assert 120 << 20 < session.rpc("bench_touch_cache") <= 128 << 20
        session.rpc("bench_reset_peak")
        assert session.rpc("bench_peak_bytes") > 128 << 20
