# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M: 15 layers with a window of 512 tokens, 3 full ones, D=256."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TEXT
from tests.e2e.harness import Engine, replay_tolerance

NUM_LAYERS = 18


@pytest.fixture(scope="module")
def engine(gemma3: Path) -> Iterator[Engine]:
    with Engine(gemma3, "polykv_k7v4", max_num_batched_tokens=256) as engine:
        yield engine


def test_logprobs_equal_reference_attention_beyond_the_window(engine: Engine) -> None:
    prompt = engine.tokenize(TEXT)[:700]
    difference = engine.replay_difference(prompt)
    assert difference <= replay_tolerance(2**-9, NUM_LAYERS)


def test_hit_equals_miss_beyond_the_window(engine: Engine) -> None:
    prompt = engine.tokenize(TEXT)[:810]  # 3 chunks of 256 and one of 42
    miss = engine.score(prompt)
    hit = engine.score(prompt, read_cache=True)
    assert hit.num_cached_tokens == 768
    assert hit.max_difference(miss) == 0.0


def test_text_is_predicted(engine: Engine) -> None:
    """A licence that every model has read: under 2 nats a token; noise would be 12."""
    assert engine.score(engine.tokenize(TEXT)[:700]).mean() > -2.5
