# SPDX-License-Identifier: Apache-2.0
"""Key treatments in the real engine, on small models with random weights and norms."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from polykv_vllm.keys import RotaryPairs, channel_scales
from tests.e2e.conftest import TEXT
from tests.e2e.harness import Engine, replay_tolerance
from tests.quantized_models import KINDS, quantize_checkpoint
from tests.random_models import (
    FAMILIES,
    SHAPE,
    expected_projection,
    save_random_model,
)

NUM_LAYERS = SHAPE["num_hidden_layers"]
PROMPT = [(7 * i * i + i) % SHAPE["vocab_size"] for i in range(300)]


def engine(
    model: Path,
    treatment: str | None,
    dtype: str = "float32",
    kv_cache_dtype: str = "polykv_k8v4",
    **more: Any,
) -> Engine:
    options = {} if treatment is None else {"key_treatment": treatment}
    return Engine(
        model,
        kv_cache_dtype,
        skip_tokenizer_init=True,
        dtype=dtype,
        block_size=32,
        max_num_batched_tokens=288,
        additional_config={"polykv": options},
        **more,
    )


def complete(served: Engine) -> list[int]:
    (output,) = served.generate([PROMPT], max_tokens=24, ignore_eos=True)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_understood(family: str, tmp_path: Path) -> None:
    """Every family's transforms are those of its weights, and attention knows them."""
    model = save_random_model(tmp_path, family)
    with engine(tmp_path, "channel_scale_hadamard") as served:
        transforms = served.call("polykv_key_transforms")
        projections = served.call("polykv_key_projections")
        assert served.replay_difference(PROMPT) <= replay_tolerance(2**-14, NUM_LAYERS)
        miss = served.score(PROMPT)
        hit = served.score(PROMPT, read_cache=True)
    assert hit.num_cached_tokens == 288
    assert hit.max_difference(miss) == 0.0
    assert len(transforms) == NUM_LAYERS
    for name, (treatment, scales) in transforms.items():
        assert treatment == "channel_scale_hadamard"
        expected = expected_projection(model, int(name.split(".")[2]))
        found = projections[name]
        for part in ("key_bias", "key_spread", "query_bias", "query_spread"):
            torch.testing.assert_close(
                torch.tensor(found[part]), getattr(expected, part)
            )
        assert RotaryPairs(**found["rotary"]) == expected.rotary
        torch.testing.assert_close(torch.tensor(scales), channel_scales(expected))


def test_a_large_key_bias_is_treated(tmp_path: Path) -> None:
    """By itself, also in bf16, where the bias would swallow the weights beside it."""
    model = save_random_model(tmp_path, "qwen2", key_bias=300.0)
    with engine(tmp_path, None, "bfloat16") as served:
        transforms = served.call("polykv_key_transforms")
    for name, (treatment, scales) in transforms.items():
        assert treatment == "channel_scale_hadamard"
        expected = expected_projection(model, int(name.split(".")[2]))
        # Weights, gains and biases are rounded to bf16 each.
        torch.testing.assert_close(
            torch.tensor(scales), channel_scales(expected), rtol=0.01, atol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_are_understood(kind: str, tmp_path: Path) -> None:
    """The layer is asked, so how its weights are stored does not matter."""
    model = save_random_model(tmp_path, "qwen2", key_bias=300.0)
    quantize_checkpoint(tmp_path, model, kind)
    with engine(tmp_path, None, "bfloat16") as served:
        transforms = served.call("polykv_key_transforms")
        assert served.replay_difference(PROMPT) <= replay_tolerance(2**-9, NUM_LAYERS)
    for name, (treatment, scales) in transforms.items():
        assert treatment == "channel_scale_hadamard"
        expected = expected_projection(model, int(name.split(".")[2]))
        # bf16's rounding of weights, gains and biases, and int8's of activations.
        torch.testing.assert_close(
            torch.tensor(scales), channel_scales(expected), rtol=0.02, atol=0
        )


def test_treatment_keeps_what_a_bias_would_lose(tmp_path: Path) -> None:
    save_random_model(tmp_path, "qwen2", key_bias=300.0)
    scores = {}
    for treatment in ("none", "auto"):
        with engine(tmp_path, treatment, kv_cache_dtype="polykv_k8v8") as served:
            scores[treatment] = served.score(PROMPT)
            assert served.replay_difference(PROMPT) <= replay_tolerance(
                2**-14, NUM_LAYERS
            )
    with Engine(tmp_path, "auto", skip_tokenizer_init=True, dtype="float32") as stock:
        exact = stock.score(PROMPT)
    untreated, treated = (
        sum(abs(a - b) for a, b in zip(s.logprobs, exact.logprobs, strict=True))
        for s in scores.values()
    )
    assert treated < untreated / 4


def test_without_scales_nothing_is_read(tmp_path: Path) -> None:
    save_random_model(tmp_path, "qwen2", key_bias=300.0)
    with engine(tmp_path, "hadamard") as served:
        transforms = served.call("polykv_key_transforms")
    assert list(transforms.values()) == [["hadamard", None]] * NUM_LAYERS


@pytest.mark.slow
def test_workers_adapters_and_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers have the scales of their heads; the rest changes nothing."""
    save_random_model(tmp_path, "qwen2", key_bias=300.0)
    with engine(tmp_path, None) as served:
        expected, text = served.call("polykv_key_transforms"), complete(served)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    for more in ({"enable_lora": True}, {"speculative_config": ngram}):
        with engine(tmp_path, None, **more) as served:
            assert served.call("polykv_key_transforms") == expected
            assert complete(served) == text
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers need two CPUs")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    with engine(tmp_path, None, tensor_parallel_size=2) as served:
        ranks = served.llm.collective_rpc("polykv_key_transforms")
        assert complete(served) == text
    for name, (treatment, scales) in expected.items():
        assert [rank[name][0] for rank in ranks] == [treatment] * 2
        joined = torch.tensor([head for rank in ranks for head in rank[name][1]])
        # Rows of a shard may be summed in another order.
        torch.testing.assert_close(joined, torch.tensor(scales))


@pytest.mark.slow
def test_qwen2_5_coder() -> None:
    from polykv_vllm.models import built_model

    model = built_model("qwen2.5-coder-0.5b")
    if model is None:
        pytest.skip("not built: polykv model qwen2.5-coder-0.5b")
    options = {"max_num_batched_tokens": 288, "block_size": 32}
    with Engine(model, "polykv_k8v8", **options) as served:
        transforms = served.call("polykv_key_transforms")
        prompt = served.tokenize(TEXT)[:300]
        assert served.replay_difference(prompt) <= replay_tolerance(2**-9, 24)
        treated = served.score(prompt)
    treatments = {treatment for treatment, _ in transforms.values()}
    assert treatments == {"channel_scale_hadamard"}
    with Engine(model, "auto", **options) as stock:
        exact = stock.score(prompt)
    assert abs(treated.mean() - exact.mean()) < 0.02
