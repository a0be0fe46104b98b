# SPDX-License-Identifier: Apache-2.0
"""What the engine benchmark asks of its arms, with arms that only pretend."""

from typing import Any

import pytest

from benchmarks import _engine_rounds as rounds


class FakeSession:
    """Answers like `EngineSession`; takes a fixed time for everything."""

    def __init__(self, log: list[Any], name: str = "", cached: int = 0) -> None:
        self.facts: dict[str, Any] = {}
        self.log, self.name, self.cached = log, name, cached
        self.store_s, self.peak = 0.03, 1 << 30

    def ask(self, order: str, **arguments: Any) -> Any:
        if order == "reset":
            return True
        self.log.append((self.name, tuple(arguments["prompt"]), arguments["tokens"]))
        return {
            "prefill_s": 2.0,
            "decode_s": 0.5,
            "tokens": arguments["tokens"],
            "cached_tokens": self.cached,
        }

    def rpc(self, method: str) -> Any:
        if method == "bench_store_seconds":
            return self.store_s
        if method == "bench_peak_bytes":
            self.peak -= 10
            return self.peak
        return None


def test_arms_alternate_over_the_same_prompts() -> None:
    log: list[Any] = []
    sessions = {name: FakeSession(log, name) for name in ("a", "b")}
    results = rounds.alternate_rounds(sessions, 40, new_tokens=11, rounds=2)
    assert [name for name, _, _ in log] == ["a", "b"] * 3
    prompts = [prompt for _, prompt, _ in log]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 3
    assert results["a"].medians() == (2.0, 20.0)
    assert len(results["b"].prefill_s) == 2  # without the warm-up
    assert results["a"].as_dict()["median_decode_tokens_per_s"] == 20.0


def test_a_cached_prompt_is_an_error() -> None:
    with pytest.raises(rounds.CachedPromptError, match="128 tokens"):
        rounds.request(FakeSession([], cached=128), [1], 2)


def test_a_failed_reset_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession([])
    monkeypatch.setattr(session, "ask", lambda order, **_: False)
    with pytest.raises(rounds.CachedPromptError, match="reset"):
        rounds.request(session, [1], 2)


def test_store_share() -> None:
    result = rounds.store_share(FakeSession([]), 16, rounds=3)
    assert result == {"store_s": 0.03, "prefill_s": 2.0, "share": 0.015}


def test_peak_memory_takes_the_least_after_a_warm_up_pass() -> None:
    session = FakeSession([])
    start = session.peak
    peaks = rounds.peak_memory(session, (8, 16), passes=2)
    assert peaks == {8: start - 30, 16: start - 40}
    assert [len(prompt) for _, prompt, _ in session.log] == [8, 16, 16, 8, 8, 16]
