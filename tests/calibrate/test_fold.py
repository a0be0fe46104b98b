# SPDX-License-Identifier: Apache-2.0
"""Folding into transformers models: the logits stay, the cached values change."""

from pathlib import Path

import pytest
import torch
from torch import nn

from polykv_vllm.calibrate.artifact import load_calibration
from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.calibrate.fold import fold_model, folded_transform
from polykv_vllm.calibrate.transforms import hadamard
from polykv_vllm.formats import FORMATS
from tests.calibrate.models import calibrate_random
from tests.hf.models import FAMILIES, tiny_model

TURNED, PLAIN = FORMATS["polykv_k7v4"], FORMATS["polykv_k8v8"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fmt", [TURNED, PLAIN], ids=lambda fmt: fmt.name)
def test_no_logit_changes(family: str, fmt, tmp_path: Path) -> None:
    """With biases of values, groups of query heads, and sliding windows."""
    from transformers import DynamicCache

    model = tiny_model(family, attention_bias=True)
    calibrate_random(model, tmp_path)
    calibration = load_calibration(tmp_path)
    tokens = torch.randint(0, 128, (1, 64))
    caches = (DynamicCache(), DynamicCache())
    with torch.inference_mode():
        before = model(tokens, past_key_values=caches[0]).logits
        fold_model(model, calibration, fmt)
        after = model(tokens, past_key_values=caches[1]).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    for layer in range(3):
        values = [cache.layers[layer].values[0].double() for cache in caches]
        transform = folded_transform(calibration.layer(layer).value, fmt)
        expected = values[0] @ transform.mT
        torch.testing.assert_close(values[1], expected, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(values[0], values[1], atol=0.1)


def test_a_format_that_turns_values_gets_the_rest() -> None:
    t = torch.randn(3, 64, 64).double()
    assert torch.equal(folded_transform(t, PLAIN), t)
    torch.testing.assert_close(hadamard(64) @ folded_transform(t, TURNED), t)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    calibrate_random(model, tmp_path)
    calibration = load_calibration(tmp_path)
    model.model.layers[1].self_attn.v_proj.weight.data[64 + 3, 5] += 1
    before = model.model.layers[0].self_attn.v_proj.weight.clone()
    with pytest.raises(CalibrationError, match=r"layer 1, KV head 1: .* other weights"):
        fold_model(model, calibration, PLAIN)
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight, before)


def test_another_model_is_refused(tmp_path: Path) -> None:
    calibrate_random(tiny_model("llama"), tmp_path)
    calibration = load_calibration(tmp_path)
    with pytest.raises(CalibrationError, match="num_kv_heads: 4, not 2"):
        fold_model(tiny_model("llama", num_key_value_heads=4), calibration, PLAIN)
    with pytest.raises(CalibrationError, match="model_type: qwen3, not llama"):
        fold_model(tiny_model("qwen3"), calibration, PLAIN)
    stretched = tiny_model("llama", rope_theta=1e6)
    with pytest.raises(CalibrationError, match="rope"):
        fold_model(stretched, calibration, PLAIN)


def test_what_cannot_be_folded_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    calibrate_random(model, tmp_path)
    calibration = load_calibration(tmp_path)
    attention = model.model.layers[2].self_attn
    attention.v_norm = nn.LayerNorm(64)
    with pytest.raises(CalibrationError, match="layer 2 normalises its values"):
        fold_model(model, calibration, PLAIN)
    attention.v_norm = None
    attention.o_proj.weight = nn.Parameter(
        torch.zeros(128, 256, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(CalibrationError, match=r"layer 2: o_proj .* torch.int8"):
        fold_model(model, calibration, PLAIN)
