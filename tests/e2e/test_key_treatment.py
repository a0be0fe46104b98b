# SPDX-License-Identifier: Apache-2.0
"""Key treatments in the real engine, on small models with random weights and norms."""

from pathlib import Path

import pytest
import torch

from polykv_vllm.keys import RotaryPairs, channel_scales
from tests.e2e.conftest import TEXT
from tests.e2e.harness import Engine, replay_tolerance
from tests.random_models import (
    FAMILIES,
    SHAPE,
    expected_projection,
    save_random_model,
)

NUM_LAYERS = SHAPE["num_hidden_layers"]
PROMPT = [(7 * i * i + i) % SHAPE["vocab_size"] for i in range(300)]


def engine(model: Path, treatment: str | None, dtype: str = "float32") -> Engine:
    options = {} if treatment is None else {"key_treatment": treatment}
    return Engine(
        model,
        "polykv_k8v4",
        skip_tokenizer_init=True,
        dtype=dtype,
        block_size=32,
        max_num_batched_tokens=288,
        additional_config={"polykv": options},
    )


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
        assert treatment == "channel_scale"
        expected = expected_projection(model, int(name.split(".")[2]))
        # Weights, gains and biases are rounded to bf16 each.
        torch.testing.assert_close(
            torch.tensor(scales), channel_scales(expected), rtol=0.01, atol=0
        )


def test_treatment_keeps_what_a_bias_would_lose(tmp_path: Path) -> None:
    save_random_model(tmp_path, "qwen2", key_bias=300.0)
    scores = {}
    for treatment in ("none", "channel_scale"):
        with engine(tmp_path, treatment) as served:
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


@pytest.mark.parametrize("treatment", ["none", "hadamard"])
def test_without_scales_nothing_is_read(treatment: str, tmp_path: Path) -> None:
    save_random_model(tmp_path, "qwen2", key_bias=300.0)
    with engine(tmp_path, treatment) as served:
        transforms = served.call("polykv_key_transforms")
    assert list(transforms.values()) == [[treatment, None]] * NUM_LAYERS


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
    assert {treatment for treatment, _ in transforms.values()} == {"channel_scale"}
    with Engine(model, "auto", **options) as stock:
        exact = stock.score(prompt)
    assert abs(treated.mean() - exact.mean()) < 0.02
