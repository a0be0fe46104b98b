# SPDX-License-Identifier: Apache-2.0
"""What is read from weights must be what keys do."""

import pytest
import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import get_format
from polykv_vllm.hf import read_projections
from polykv_vllm.hf.treatment import key_transforms
from tests.hf.models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_spread_and_bias_are_those_of_random_inputs(family: str) -> None:
    """Layer 1's projection of many normalised inputs of unit variance."""
    model = tiny_model(family)
    projection = read_projections(model)[1]
    layer = model.model.layers[1]
    hidden = layer.input_layernorm(torch.randn(20_000, 128))
    for name, bias, spread in (
        ("k", projection.key_bias, projection.key_spread),
        ("q", projection.query_bias, projection.query_spread),
    ):
        heads = 2 if name == "k" else 4
        rows = getattr(layer.self_attn, f"{name}_proj")(hidden).view(-1, heads, 64)
        if hasattr(layer.self_attn, f"{name}_norm"):
            rows = getattr(layer.self_attn, f"{name}_norm")(rows)
        measured = rows.square().mean(0).sqrt()
        expected = (bias.square() + spread.square()).sqrt()
        assert (measured / expected - 1).abs().max() < 0.05
        assert (rows.mean(0) - bias).abs().max() < 0.05 * float(measured.max())
    assert (projection.key_bias.abs().max() > 0) == (family == "qwen2")
    assert projection.rotary is not None
    assert (projection.rotary.dim, projection.rotary.style) == (64, "neox")


def test_models_with_other_parts_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.k_proj = None
    del model.model.layers[1].self_attn.k_proj
    with pytest.raises(UnsupportedError, match="layer 1 of llama has no self_attn"):
        read_projections(model)


@pytest.mark.parametrize(
    ("treatment", "has_scales", "rotates"),
    [
        ("channel_scale", True, False),
        ("hadamard", False, True),
        ("channel_scale_hadamard", True, True),
    ],
)
def test_a_treatment_is_made_for_each_layer(
    treatment: str, has_scales: bool, rotates: bool
) -> None:
    transforms = key_transforms(tiny_model("qwen2"), get_format("polykv"), treatment)
    assert transforms is not None and len(transforms) == 3
    for transform in transforms:
        assert transform.treatment == treatment
        assert (transform.scales is not None) == has_scales
        assert transform.rotate == rotates


def test_no_treatment_needs_no_weights() -> None:
    assert key_transforms(object(), get_format("polykv"), "none") is None
    # Small random biases ask for nothing.
    assert key_transforms(tiny_model("llama"), get_format("polykv")) is None
