# SPDX-License-Identifier: Apache-2.0
"""The figures that the demo ends with."""

from dataclasses import dataclass

from polykv_vllm.demo.agents import Wave
from polykv_vllm.scrape import PrefixCounters


@dataclass(frozen=True)
class CacheFigures:
    """One KV cache.

    Attributes:
        dtype: As `--kv-cache-dtype` says it.
        memory_bytes: Size of the cache.
        block_size: Tokens of a block.
        token_bytes: Bytes of one token in all layers.
        capacity_tokens: Tokens that the cache holds.
        source: Where `capacity_tokens` comes from, for the reader.

    """

    dtype: str
    memory_bytes: int
    block_size: int
    token_bytes: int
    capacity_tokens: int
    source: str


@dataclass(frozen=True)
class WaveFigures:
    """One wave of requests.

    Attributes:
        requests: Sent at the same time.
        prompt_tokens: Of all prompts.
        prefix: Tokens looked up and found in the prefix cache.
        first_token_s: Median seconds to the first text.
        tokens_per_s: Output tokens of all agents per second, prefill included.

    """

    requests: int
    prompt_tokens: int
    prefix: PrefixCounters
    first_token_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, wave: Wave, prefix: PrefixCounters) -> "WaveFigures":
        """Take the figures of a finished wave."""
        return cls(
            requests=len(wave.turns),
            prompt_tokens=wave.prompt_tokens,
            prefix=prefix,
            first_token_s=wave.first_token_s,
            tokens_per_s=wave.tokens_per_s,
        )


@dataclass(frozen=True)
class Arm:
    """One server with one cache dtype."""

    cache: CacheFigures
    waves: tuple[WaveFigures, ...]
