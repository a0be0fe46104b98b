# SPDX-License-Identifier: Apache-2.0
"""One physical copy of a shared prefix, in whatever order its requests arrive.

The model is small and random: scheduling does not depend on what it computes.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TEXT
from tests.e2e.harness import fast_dtype
from tests.e2e.scheduling import run_cases
from tests.random_models import VOCABULARY, save_model

BLOCK = 32
CHUNK = 48  # tokens of a request per step: ends inside a block
PREFIX = [(7 * i * i + i) % VOCABULARY for i in range(10 * BLOCK)]
OTHER = [(5 * i * i + 3 * i + 1) % VOCABULARY for i in range(10 * BLOCK)]
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "long_prefill_token_threshold": CHUNK,
    "max_num_batched_tokens": 256,  # several chunks per step
}
Result = dict[str, Any]


def agents(prefix: list[int], count: int = 6, **options: Any) -> list[dict[str, Any]]:
    """Requests with a common prefix and private tokens, of another number each."""
    return [{"prompt": prefix + [i] * (5 + 9 * i)} | options for i in range(count)]


def staggered(every: int) -> list[dict[str, Any]]:
    return [a | {"arrival": every * i} for i, a in enumerate(agents(PREFIX))]


def scoring(requests: list[dict[str, Any]], *indices: int) -> list[dict[str, Any]]:
    """Let some requests ask for what keeps them from reading the cache."""
    extra = {"sampling": {"prompt_logprobs": 0}}
    return [r | extra if i in indices else r for i, r in enumerate(requests)]


def salted(salt: str) -> list[dict[str, Any]]:
    return agents(PREFIX, 3, salt=salt)


CASES: dict[str, list[dict[str, Any]]] = {
    "together": agents(PREFIX),
    "a step apart": staggered(1),
    "three steps apart": staggered(3),
    "leader aborted": [*agents(PREFIX, 1, abort=2), *agents(PREFIX)],
    "all leaders aborted": [*agents(PREFIX, 4, abort=2), *agents(PREFIX)],
    "equal prompts": [{"prompt": PREFIX} for _ in range(6)],
    "prefix ends inside a block": agents(PREFIX[:-11]),
    "prefix is a part of a block": agents(PREFIX[: BLOCK - 1]),
    "nested prefixes": [*agents(PREFIX, 3), *agents(PREFIX[:160] + OTHER[:160], 3)],
    "two prefixes": [*agents(PREFIX, 3), *agents(OTHER, 3)],
    "log-probabilities of prompts": scoring(agents(PREFIX), 0, 3),
    "log-probabilities last": scoring(agents(PREFIX), 5),
    "cache salts": [*salted("a"), *salted("b")],
}
COMPARED = (
    "together",
    "equal prompts",
    "prefix is a part of a block",
    "nested prefixes",
    "log-probabilities of prompts",
    "log-probabilities last",
)
"""Cases that vLLM's own scheduler runs, too."""


def prompt_blocks(result: Result, requests: list[dict[str, Any]], num: int) -> set[int]:
    """Physical blocks that hold the first `num` blocks of the requests."""
    live = [str(i) for i, r in enumerate(requests) if "abort" not in r]
    assert set(live) <= set(result["tables"])
    return {block for n in live for block in result["tables"][n][0][:num]}


def alone(request: dict[str, Any]) -> int:
    """Steps that a request would take that finds nothing in the cache."""
    return -(-len(request["prompt"]) // CHUNK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return save_model(path, "llama", {"hidden_size": 192, "num_attention_heads": 3})


@pytest.fixture(scope="module")
def results(model: Path) -> dict[str, Result]:
    cases = {name: {"requests": requests} for name, requests in CASES.items()}
    stock = {f"stock: {n}": cases[n] | {"stock": True} for n in COMPARED}
    return run_cases(model, OPTIONS, cases | stock)


@pytest.mark.parametrize("name", CASES)
def test_no_block_is_held_twice(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert result["scheduler"] == "SingleCopyScheduler"
    assert result["duplicates"] == 0


def test_the_count_is_that_of_the_prefix(results: dict[str, Result]) -> None:
    """And vLLM's own scheduler shows that the count can be another one."""
    requests = CASES["together"]
    assert len(prompt_blocks(results["together"], requests, 10)) == 10
    stock = results["stock: together"]
    assert stock["scheduler"] == "Scheduler"
    assert len(prompt_blocks(stock, requests, 10)) > 20
    assert stock["duplicates"] > 10
    requests = CASES["equal prompts"]
    assert len(prompt_blocks(results["equal prompts"], requests, 10)) == 10
    assert len(prompt_blocks(results["nested prefixes"], CASES["nested prefixes"], 10))
    salts = CASES["cache salts"]
    assert len(prompt_blocks(results["cache salts"], salts, 10)) == 20


@pytest.mark.parametrize("name", CASES)
def test_nobody_gets_the_first_token_later(
    results: dict[str, Result], name: str
) -> None:
    """Than when it computes all of its prompt itself, or with vLLM's scheduler.

    The first may be out of reach where the budget of a step is too small for all.
    """
    stock = results.get(f"stock: {name}", {"first_step": {}})["first_step"]
    for index, request in enumerate(CASES[name]):
        if "abort" not in request:
            first = results[name]["first_step"][str(index)]
            own = request.get("arrival", 0) + alone(request) - 1
            assert first <= max(own, stock.get(str(index), 0)), (index, first, own)


@pytest.mark.parametrize("name", COMPARED)
def test_no_more_is_computed_than_by_vllm(
    results: dict[str, Result], name: str
) -> None:
    stock = results[f"stock: {name}"]
    result = results[name]
    assert sum(result["scheduled"].values()) <= sum(stock["scheduled"].values())
    assert max(result["tokens_per_step"]) <= OPTIONS["max_num_batched_tokens"]
    if name == "together":
        for index in range(6):
            first = str(index)
            assert result["first_step"][first] <= stock["first_step"][first]
        new = sum(len(r["prompt"]) - len(PREFIX) for r in CASES[name])
        assert len(PREFIX) + new <= sum(result["scheduled"].values())
        assert sum(result["scheduled"].values()) < len(PREFIX) + new + 60


@pytest.mark.parametrize("name", COMPARED)
def test_the_outputs_are_those_of_vllm(results: dict[str, Result], name: str) -> None:
    """Log-probabilities, in fp32, up to the order of sums in the linear layers.

    Their matrices have other shapes when less is computed; codes on the edge of a
    quantization step may then differ. The greedy tokens of this model hang on less.
    """
    stock = results[f"stock: {name}"]
    for index, request in enumerate(CASES[name]):
        if "abort" not in request:
            mine = results[name]["logprobs"][str(index)][0]
            assert mine == pytest.approx(stock["logprobs"][str(index)][0], abs=0.02)


def test_preemption_priority_and_slots(model: Path) -> None:
    """A pool that is too small, and requests that could take a follower's slot."""
    urgent = [a | {"priority": -i, "arrival": i} for i, a in enumerate(agents(PREFIX))]
    strangers = [{"prompt": OTHER[i : i + 40]} for i in range(4)]
    cases = {
        "preemption": {"requests": agents(PREFIX), "num_tokens": 60, "finish": True},
        "priority": {"requests": urgent, "finish": True},
        "slots": {"requests": [*agents(PREFIX, 4), *strangers], "finish": True},
    }
    tight = {
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 19,
        "max_model_len": 512,
        "scheduling_policy": "priority",
    }
    results = run_cases(model, OPTIONS | tight, cases)
    assert results["preemption"]["preempted"] > 0
    assert {n: r["duplicates"] for n, r in results.items()} == dict.fromkeys(cases, 0)
    first = results["slots"]["first_step"]
    assert max(first[str(i)] for i in range(4)) < min(first[str(i)] for i in (4, 5))


def test_layers_with_sliding_windows(tmp_path: Path) -> None:
    """vLLM keeps a window in its cache only where it expects a hit."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    changes = {"head_dim": 64, "sliding_window": 64, "layer_types": kinds}
    model = save_model(tmp_path, "gemma3_text", changes)
    names = ("together", "a step apart", "equal prompts", "nested prefixes")
    cases = {name: {"requests": CASES[name]} for name in names}
    stock = {f"stock: {n}": c | {"stock": True} for n, c in cases.items()}
    results = run_cases(model, OPTIONS, cases | stock)
    for name in names:
        assert results[name]["duplicates"] == 0, name
        computed = sum(results[name]["scheduled"].values())
        assert computed <= sum(results[f"stock: {name}"]["scheduled"].values())
        for index, request in enumerate(CASES[name]):
            first = results[name]["first_step"][str(index)]
            assert first < request.get("arrival", 0) + alone(request)
    assert results["stock: together"]["duplicates"] > 0


def test_15_agents_with_a_prompt_of_3072_tokens(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(smollm2)(TEXT * 2)["input_ids"]
    prefix = text[:3072]
    assert len(prefix) == 3072
    requests = [{"prompt": prefix + text[i : i + 20]} for i in range(15)]
    options = {
        "max_model_len": 3328,
        "max_num_seqs": 16,
        "long_prefill_token_threshold": 128,
        "max_num_batched_tokens": 1024,
        "dtype": fast_dtype(),
    }
    result = run_cases(smollm2, options, {"agents": {"requests": requests}})["agents"]
    assert len(prompt_blocks(result, requests, 24)) == 24
    assert result["duplicates"] == 0
    assert max(result["first_step"].values()) < 25  # 3,092 tokens in chunks of 128
    assert sum(result["scheduled"].values()) < 3072 + 15 * 24
