# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M (all layers full attention, D=64) with block size 128, eager."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.conftest import TEXT
from tests.e2e.harness import UNIT, Engine, fast_dtype, replay_tolerance

# Several engines, or long prompts, on a slow and busy machine.
pytestmark = pytest.mark.timeout(1500)

CHUNK_TOKENS = 128
DTYPE = fast_dtype()
ITEM_BYTES = {"bfloat16": 2, "float32": 4}[DTYPE]
OPTIONS = {
    "dtype": DTYPE,
    "kv_cache_memory_bytes": ITEM_BYTES << 26,  # stock's cache holds one request
    "max_num_batched_tokens": CHUNK_TOKENS,
    "max_model_len": 5376,
}


def shared_prefix_prompts(engine: Engine) -> list[list[int]]:
    """Prompts with a common prefix, one that is complete, and one that is short."""
    tokens = engine.tokenize(TEXT)
    prompts = [tokens[:700] + [200 + i] * (5 + 40 * i) for i in range(4)]
    return [*prompts, tokens[:256], tokens[:256], tokens[:257], tokens[:1]]


def serve_prompts_twice(engine: Engine) -> list[int]:
    """Prefix-cache hits, in tokens, of each prompt."""
    prompts = shared_prefix_prompts(engine) * 2
    return [engine.generate([p])[0].num_cached_tokens for p in prompts]


@pytest.fixture(scope="module")
def stock(smollm2: Path) -> SimpleNamespace:
    """What vLLM does with its own cache dtype, for comparison."""
    with Engine(smollm2, "auto", **OPTIONS) as engine:
        return SimpleNamespace(
            capacity_tokens=engine.capacity_tokens(),
            hits=serve_prompts_twice(engine),
            score=engine.score(engine.tokenize(TEXT)[:600]),
        )


@pytest.fixture(scope="module")
def engine(stock: SimpleNamespace, smollm2: Path) -> Iterator[Engine]:
    with Engine(smollm2, **OPTIONS) as engine:
        yield engine


def test_capacity_for_the_same_bytes(engine: Engine, stock: SimpleNamespace) -> None:
    stock_16_bits = stock.capacity_tokens * ITEM_BYTES / 2
    assert engine.capacity_tokens() >= 2.75 * stock_16_bits


def test_prefix_cache_hits_are_those_of_stock(
    engine: Engine, stock: SimpleNamespace
) -> None:
    assert serve_prompts_twice(engine) == stock.hits
    assert max(stock.hits) == 768


def test_logprobs_equal_reference_attention(engine: Engine) -> None:
    prompt = engine.tokenize(TEXT)[:400]
    difference = engine.replay_difference(prompt)
    assert difference <= replay_tolerance(UNIT[DTYPE], num_layers=30)


def test_compression_costs_little(engine: Engine, stock: SimpleNamespace) -> None:
    score = engine.score(engine.tokenize(TEXT)[:600])
    assert score.mean() == pytest.approx(stock.score.mean(), rel=0.1)


@pytest.mark.parametrize("length", [2 * 128, 2 * 128 + 1, 3 * 128 + 44])
def test_hit_equals_miss(engine: Engine, length: int) -> None:
    """The rows that a hit leaves to compute are computed alike by a miss: bit for bit.

    A miss in chunks of one block computes the last chunk with the same shapes, so
    also the linear layers see the same matrices.
    """
    prompt = engine.tokenize(TEXT)[1000 : 1000 + length]
    miss = engine.score(prompt)
    hit = engine.score(prompt, read_cache=True)
    assert miss.num_cached_tokens == 0
    assert hit.num_cached_tokens == (length - 1) // 128 * 128
    assert hit.max_difference(miss) == 0.0


def test_prefill_in_40_chunks_takes_no_memory(engine: Engine) -> None:
    """Case 20: nothing is allocated that grows with the context."""
    tokens = engine.tokenize(TEXT)
    prompt = (tokens * 3)[: 40 * CHUNK_TOKENS]
    assert len(prompt) == 40 * CHUNK_TOKENS
    engine.call("polykv_touch_cache")
    engine.llm.reset_prefix_cache()
    engine.generate([prompt[: 4 * CHUNK_TOKENS]])
    before_kib = engine.call("polykv_peak_memory_kib")
    (output,) = engine.generate([prompt], max_tokens=8, ignore_eos=True)
    grown_kib = engine.call("polykv_peak_memory_kib") - before_kib
    assert len(output.outputs[0].token_ids) == 8
    # Keys and values of one layer, dequantized to bf16, would take 3,840 KiB.
    assert grown_kib < 2048
