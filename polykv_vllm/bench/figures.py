# SPDX-License-Identifier: Apache-2.0
"""From what the client and the server counted to the figures of a run."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from polykv_vllm.capacity import capacity_tokens
from polykv_vllm.scrape import CacheReport, PrefixCounters

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Phase:
    """One wave of requests: cold (empty prefix cache) or warm (shared part cached).

    Attributes:
        agents: Requests that were answered.
        requested_output_tokens: Of all requests.
        output_tokens: That came.
        output_tokens_per_s: From the first request to the last token.
        decode_tokens_per_s: While every agent was generating.
        ttft_ms: Median time to the first token.
        ttft_max_ms: The last agent's.
        itl_ms: Time between two tokens, by percentile.
        tpot_ms: Time per token after the first, mean of a request, by percentile.
        prompt_tokens: Looked up in the prefix cache.
        hit_tokens: Found there.
        preemptions: Requests that lost their blocks.
        shared_rate: Share of the attended tokens that were read once for several
            agents; None where the server does not count them.

    """

    agents: int
    requested_output_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float
    ttft_max_ms: float
    itl_ms: dict[str, float]
    tpot_ms: dict[str, float]
    prompt_tokens: int
    hit_tokens: int
    preemptions: int
    shared_rate: float | None

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return asdict(self)


def phase_of(
    record: Mapping[str, Any],
    requested_output_tokens: int,
    prefix: PrefixCounters,
    preemptions: int,
    shared_rate: float | None,
) -> Phase:
    """Take the figures of one wave from the client's result.

    The client has the times of every token; it leaves percentiles to us, because it
    has no tokenizer (prompts are token ids).

    Args:
        record: What `vllm bench serve --save-detailed` wrote.
        requested_output_tokens: Of all requests together.
        prefix: Counted by the server during the wave.
        preemptions: Likewise.
        shared_rate: Likewise.

    """
    return Phase(
        agents=record["completed"],
        requested_output_tokens=requested_output_tokens,
        output_tokens=record["total_output_tokens"],
        output_tokens_per_s=record["output_throughput"],
        decode_tokens_per_s=decode_rate(record),
        ttft_ms=1e3 * statistics.median(record["ttfts"]),
        ttft_max_ms=1e3 * max(record["ttfts"]),
        itl_ms=percentiles_ms([gap for itls in record["itls"] for gap in itls]),
        tpot_ms=percentiles_ms(_tpots(record)),
        prompt_tokens=prefix.queried_tokens,
        hit_tokens=prefix.hit_tokens,
        preemptions=preemptions,
        shared_rate=shared_rate,
    )


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of `seconds` in milliseconds; NaN if there are none."""
    if not seconds:
        return dict.fromkeys((f"p{p}" for p in PERCENTILES), math.nan)
    values = np.percentile(np.asarray(seconds) * 1e3, PERCENTILES)
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)}


def _tpots(record: Mapping[str, Any]) -> list[float]:
    """Return for each request the mean time of a token after the first, seconds."""
    return [
        sum(itls) / (tokens - 1)
        for itls, tokens in zip(record["itls"], record["output_lens"], strict=True)
        if tokens > 1
    ]


def decode_rate(record: Mapping[str, Any]) -> float:
    """Return tokens per second of all agents while all of them were generating.

    The window goes from the last agent's first token to the first agent's last, so
    that no prefill and no half-empty batch is in it. NaN if there is no such time.
    """
    times = [
        _token_times(start, ttft, itls)
        for start, ttft, itls in zip(
            record["start_times"], record["ttfts"], record["itls"], strict=True
        )
    ]
    begin = max(each[0] for each in times)
    end = min(each[-1] for each in times)
    if end <= begin:
        return math.nan
    chunks = sum(begin < time <= end for each in times for time in each)
    # The server may put several tokens into one chunk when the client is slow.
    tokens_per_chunk = record["total_output_tokens"] / sum(map(len, times))
    return chunks * tokens_per_chunk / (end - begin)


def _token_times(start: float, ttft: float, itls: Sequence[float]) -> list[float]:
    times = [start + ttft]
    for gap in itls:
        times.append(times[-1] + gap)
    return times


@dataclass(frozen=True)
class Spread:
    """Median and range over the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize one value per repetition (at least one)."""
        return cls(statistics.median(values), min(values), max(values))


def median_of(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each key over the repetitions."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def share_of_possible(stock: float, ours: float, bound: float) -> float:
    """Return which part of the time that attention costs stock is saved, 0..1.

    Args:
        stock: Tokens per second of the arm compared with.
        ours: Of the arm in question.
        bound: Of an engine whose attention costs nothing.

    """
    possible = 1 / stock - 1 / bound
    return (1 / stock - 1 / ours) / possible if possible > 0 else math.nan


def token_bytes(report: CacheReport, expected: int) -> float:
    """Return the cache bytes of one token in all layers.

    Args:
        report: What the engine says; its blocks are whole, so that the quotient of
            size and tokens is a little too large.
        expected: From the model's config; taken if it explains the engine's blocks.

    """
    tokens = report.num_blocks * report.block_size
    if expected and tokens == capacity_tokens(
        report.memory_bytes, expected, report.block_size
    ):
        return expected
    return report.memory_bytes / tokens


def prefixes_per_gib(token_bytes: float, block_size: int, shared_tokens: int) -> int:
    """Return how many different prompts of `shared_tokens` stay cached in one GiB."""
    blocks = int(2**30 // (token_bytes * block_size))
    return blocks // -(-shared_tokens // block_size)


def distinct_agents(num_blocks: int, block_size: int, tokens: int) -> int:
    """Return how many requests of `tokens` tokens each have all their blocks at once.

    Args:
        num_blocks: Of the cache, one of which vLLM keeps for itself.
        block_size: Tokens of a block.
        tokens: Prompt and output of one request.

    """
    return (num_blocks - 1) // -(-tokens // block_size)
