# SPDX-License-Identifier: Apache-2.0
"""The orders of an engine process, on the real engine and model.

Prefill goes in steps of 160 tokens, so that requests are cut and share steps. The cache
is ours: its attention gives the same bits however a prompt is cut and whether its start
came from the cache, so that scores can be compared exactly.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polykv_vllm.evaluate.engine_process import EngineProcess, OrderError
from polykv_vllm.evaluate.text import load_tokenizer, tokenize
from polykv_vllm.models import build_model

pytestmark = pytest.mark.e2e

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def model() -> Path:
    return build_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[int]:
    return tokenize(TEXT, load_tokenizer(str(model)))


@pytest.fixture(scope="module")
def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    options = {
        "model": str(model),
        "kv_cache_dtype": "polykv_k8v8",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 640,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 160,
        "seed": 0,
    }
    states = tmp_path_factory.mktemp("states")
    process = EngineProcess(options, str(states), is_reference=True)
    yield process
    process.close()


def request(
    key: str, tokens: list[int], begin: int, cached_tokens: int = 0
) -> dict[str, Any]:
    return {
        "key": key,
        "token_ids": tokens,
        "begin": begin,
        "cached_tokens": cached_tokens,
    }


def scores(engine: EngineProcess, *requests: dict[str, Any]) -> list[np.ndarray]:
    return [np.asarray(found["nll"]) for found in engine.score(list(requests))]


def prompt_nll(engine: EngineProcess, tokens: list[int]) -> np.ndarray:
    """Return vLLM's own scores of all tokens but the first."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt: Any = {"prompt_token_ids": tokens}
    (output,) = engine._llm.generate([prompt], params, use_tqdm=False)
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return np.asarray([-entry[token].logprob for token, entry in pairs])


def test_scores_are_vllms_own_but_for_the_rounding_of_its_logits(
    engine: EngineProcess, tokens: list[int]
) -> None:
    first, second = tokens[:300], tokens[300:500]
    found = scores(engine, request("a", first, 1), request("b", second, 100))
    own = [prompt_nll(engine, first), prompt_nll(engine, second)[99:]]
    for ours, theirs in zip(found, own, strict=True):
        assert ours.shape == theirs.shape
        # Logits up to 32 in bf16 are off by up to 2^-4, the log-sum by less; and the
        # two runs share steps with other requests, whose bf16 products round otherwise.
        assert np.abs(ours - theirs).max() < 2**-2
        assert np.median(np.abs(ours - theirs)) < 2**-5
        assert abs(ours.mean() - theirs.mean()) < 0.01


def test_earlier_requests_are_not_read_and_a_cached_start_changes_nothing(
    engine: EngineProcess, tokens: list[int]
) -> None:
    long = tokens[:400]
    (fresh,) = scores(engine, request("c", long, 300))
    (again,) = scores(engine, request("c", long, 300))
    assert np.array_equal(fresh, again)
    list(engine.reset())
    document = request("document", long[:256], 1)
    _, cached = scores(engine, document, request("c", long, 300, cached_tokens=256))
    assert np.array_equal(fresh, cached)


def test_what_came_from_the_cache_is_not_scored(
    engine: EngineProcess, tokens: list[int]
) -> None:
    long = tokens[:400]
    scores(engine, request("f", long, 1))  # 384 tokens, three blocks, are cached now
    with pytest.raises(Exception, match="f: position 299 was not computed"):
        scores(engine, request("f", long, 300, cached_tokens=256))


def test_a_full_request_has_room_for_no_further_token(
    engine: EngineProcess, tokens: list[int]
) -> None:
    (full,) = scores(engine, request("d", tokens[:640], 600))
    assert full.shape == (40,)


def test_what_should_be_cached_and_is_not_is_named(
    engine: EngineProcess, tokens: list[int]
) -> None:
    engine._llm.reset_prefix_cache()
    with pytest.raises(OrderError, match=r"e: 256 leading tokens .* 0 were"):
        scores(engine, request("e", tokens[100:500], 300, cached_tokens=256))


def test_answers_are_greedy_stop_and_report_the_cache(
    engine: EngineProcess, tokens: list[int]
) -> None:
    list(engine.reset())
    prompts = [tokens[:300], tokens[:300] + tokens[320:330]]
    (cold,) = engine.generate(prompts, max_tokens=8, stop=[])
    (warm,) = engine.generate(prompts, max_tokens=8, stop=[])
    assert [a["token_ids"] for a in warm] == [a["token_ids"] for a in cold]
    assert [a["cached_tokens"] for a in warm] == [256, 256]
    assert [a["finish_reason"] for a in warm] == ["length", "length"]
    text = warm[0]["text"]
    word = text.split()[1]
    (stopped,) = engine.generate(prompts[:1], max_tokens=8, stop=[word])
    assert stopped[0]["finish_reason"] == "stop"
    assert stopped[0]["text"] == text[: text.index(word)]
