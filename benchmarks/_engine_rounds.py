# SPDX-License-Identifier: Apache-2.0
"""What the engine benchmark measures, given running arms."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_FIRST_ID, _LAST_ID = 1000, 30_000  # ordinary tokens of any catalogue model


class Session(Protocol):
    """What is needed of `EngineSession`."""

    facts: dict[str, Any]

    def ask(self, order: str, **arguments: Any) -> Any:
        """Carry out an order."""

    def rpc(self, method: str) -> Any:
        """Call a method of the worker."""


class CachedPromptError(RuntimeError):
    """A prompt came from the prefix cache, so that its prefill time means nothing."""


@dataclass
class Rounds:
    """One value per round of one arm."""

    prefill_s: list[float] = field(default_factory=list)
    decode_tokens_per_s: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float]:
        """Return the medians of prefill time and decode rate."""
        return (
            statistics.median(self.prefill_s),
            statistics.median(self.decode_tokens_per_s),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return values and medians for the JSON report."""
        prefill, decode = self.medians()
        return {
            "prefill_s": self.prefill_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "median_prefill_s": prefill,
            "median_decode_tokens_per_s": decode,
        }


def make_prompt(length: int, seed: int) -> list[int]:
    """Return `length` random token ids: no two seeds share a block."""
    generator = random.Random(seed)
    return [generator.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]


def request(session: Session, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Run one request against an empty prefix cache.

    Raises:
        CachedPromptError: The cache could not be emptied, or was hit all the same.

    """
    if not session.ask("reset"):
        raise CachedPromptError("vLLM did not reset its prefix cache")
    result: dict[str, Any] = session.ask("generate", prompt=prompt, tokens=tokens)
    if result["cached_tokens"]:
        raise CachedPromptError(f"{result['cached_tokens']} tokens were cached")
    return result


def alternate_rounds(
    sessions: Mapping[str, Session], prompt_tokens: int, new_tokens: int, rounds: int
) -> dict[str, Rounds]:
    """Let the arms take turns, A B A B, after one warm-up round.

    Every round has a prompt of its own, the same for all arms.

    Args:
        sessions: Name to running arm.
        prompt_tokens: Length of the prompt.
        new_tokens: Tokens to generate, at least 2.
        rounds: Measured rounds.

    """
    results = {name: Rounds() for name in sessions}
    for number in range(rounds + 1):
        prompt = make_prompt(prompt_tokens, seed=number)
        for name, session in sessions.items():
            times = request(session, prompt, new_tokens)
            if number == 0:
                continue
            results[name].prefill_s.append(times["prefill_s"])
            rate = (times["tokens"] - 1) / times["decode_s"]
            results[name].decode_tokens_per_s.append(rate)
    return results


def store_share(session: Session, chunk_tokens: int, rounds: int) -> dict[str, float]:
    """Return how long an engine stores K and V while it prefills one chunk.

    Returns:
        `store_s` (all layers) and `prefill_s`, medians, and `share`, the median of
        their quotients.

    """
    session.rpc("bench_time_store")
    stores, prefills = [], []
    for number in range(rounds + 1):
        session.rpc("bench_store_seconds")
        times = request(session, make_prompt(chunk_tokens, seed=1000 + number), 1)
        seconds = session.rpc("bench_store_seconds")
        if number:
            stores.append(seconds)
            prefills.append(times["prefill_s"])
    shares = [s / p for s, p in zip(stores, prefills, strict=True)]
    return {
        "store_s": statistics.median(stores),
        "prefill_s": statistics.median(prefills),
        "share": statistics.median(shares),
    }


def peak_memory(
    session: Session, contexts: Sequence[int], passes: int = 2
) -> dict[int, int]:
    """Return the worker's peak resident bytes by context length.

    All pages of the cache are resident beforehand, and every context was computed once,
    so what differs between the contexts is what the context itself needs. The least of
    `passes` values counts: allocators only ever add.
    """
    session.rpc("bench_touch_cache")
    peaks: dict[int, list[int]] = {context: [] for context in contexts}
    for number in range(passes + 1):
        # Up and down in turn: what an allocator adds over time is no growth.
        for context in reversed(contexts) if number % 2 else contexts:
            prompt = make_prompt(context, seed=2000 + number)
            session.rpc("bench_reset_peak")
            request(session, prompt, 2)
            if number:
                peaks[context].append(session.rpc("bench_peak_bytes"))
    return {context: min(values) for context, values in peaks.items()}
