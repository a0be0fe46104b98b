# SPDX-License-Identifier: Apache-2.0
"""What a model's modules say about its keys. Real models: tests/e2e."""

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.keys import RotaryPairs, channel_scales

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 96, 4, 2, 64


class Projection(torch.nn.Module):
    """Takes and returns what a linear layer of vLLM does."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.input_size, self.skip_bias_add = HIDDEN, False
        self.weight = torch.randn(outputs, HIDDEN) * 0.05
        self.bias = torch.randn(outputs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y = x @ self.weight.to(x.dtype).T
        if self.skip_bias_add:
            return y, self.bias
        return y + self.bias.to(x.dtype), None


class Decoder(torch.nn.Module):
    """One decoder layer with a layer norm, which has a bias, and partial RoPE."""

    def __init__(self, impl: Any) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.LayerNorm(HIDDEN)
        torch.nn.init.normal_(self.input_layernorm.weight)
        torch.nn.init.normal_(self.input_layernorm.bias)
        self.self_attn = torch.nn.Module()
        self.self_attn.qkv_proj = Projection((HEADS + 2 * KV_HEADS) * HEAD_SIZE)
        self.self_attn.rotary_emb = torch.nn.Module()
        self.self_attn.rotary_emb.rotary_dim = 32
        self.self_attn.rotary_emb.is_neox_style = False
        self.self_attn.attn = torch.nn.Module()
        self.self_attn.attn.impl = impl


@pytest.fixture
def make_impl() -> Iterator[Any]:
    """Build implementations under an engine configuration with a treatment."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from polykv_vllm.attention.impl import PolyKVImpl

    def make(treatment: str = "auto") -> Any:
        options = {"isa": "scalar", "key_treatment": treatment}
        config = VllmConfig(additional_config={"polykv": options})
        with set_current_vllm_config(config):
            return PolyKVImpl(HEADS, HEAD_SIZE, 0.125, KV_HEADS, None, None, "polykv")

    return make


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What our logger warned of."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore
    logger = logging.getLogger("vllm.polykv")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def model_of(*impls: Any) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Decoder(impl) for impl in impls)
    return model


def read(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    from polykv_vllm.attention.key_projection import read_key_projection

    attention = model.layers[0].self_attn.attn
    name = "layers.0.self_attn.attn"
    return read_key_projection(dict(model.named_modules()), name, attention.impl, dtype)


@pytest.mark.parametrize("chunk", [1 << 22, 1 << 12])
def test_bias_and_spread(
    make_impl: Any, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    from polykv_vllm.attention import key_projection

    monkeypatch.setattr(key_projection, "_CHUNK_ELEMENTS", chunk)
    model = model_of(make_impl())
    found = read(model)
    block = model.layers[0]
    projection, norm = block.self_attn.qkv_proj, block.input_layernorm
    bias = projection.bias + projection.weight @ norm.bias
    spread = (projection.weight * norm.weight).norm(dim=1)
    rows = (HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE)
    for whole, query, key in (
        (bias, found.query_bias, found.key_bias),
        (spread, found.query_spread, found.key_spread),
    ):
        expected = whole.detach().split(rows)
        torch.testing.assert_close(query, expected[0].view(HEADS, HEAD_SIZE))
        torch.testing.assert_close(key, expected[1].view(KV_HEADS, HEAD_SIZE))
    assert found.rotary == RotaryPairs(32, "gptj")
    assert projection.skip_bias_add is False


def test_a_large_bias_does_not_hide_the_weights(make_impl: Any) -> None:
    """Beside 500, bf16 has steps of 2, and the weights are about 0.05."""
    model = model_of(make_impl())
    expected = read(model).key_spread
    block = model.layers[0].bfloat16()
    block.self_attn.qkv_proj.bias += 500
    found = read(model, torch.bfloat16).key_spread
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def without_projection(attention: Any) -> None:
    del attention.qkv_proj


def without_rope(attention: Any) -> None:
    del attention.rotary_emb


def with_gate(attention: Any) -> None:
    attention.qkv_proj = Projection(HEADS * HEAD_SIZE)


def with_unknown_norm(attention: Any) -> None:
    attention.query_layernorm = torch.nn.LayerNorm(HEAD_SIZE)


def with_odd_norm(attention: Any) -> None:
    attention.k_norm = torch.nn.LayerNorm(KV_HEADS * HEAD_SIZE // 4)


def with_plain_linear(attention: Any) -> None:
    attention.qkv_proj = torch.nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    attention.qkv_proj.input_size = HIDDEN


def with_unknown_rope(attention: Any) -> None:
    attention.rotary_emb = torch.nn.Module()


UNKNOWN = {
    without_projection: "no qkv_proj",
    without_rope: "no rotary_emb",
    with_gate: "256 outputs where",
    with_unknown_norm: "what LayerNorm query_layernorm does is unknown",
    with_odd_norm: r"weight of shape \[32\], not \[64\]",
    with_plain_linear: "no linear layer of vLLM",
    with_unknown_rope: "what Module rotates is unknown",
}


@pytest.mark.parametrize("change", UNKNOWN, ids=lambda f: f.__name__)
def test_unknown_layers(make_impl: Any, change: Any, warnings: list[str]) -> None:
    """With auto they are only rotated and the log says why; else it is an error."""
    from polykv_vllm.attention.key_treatment import assign_key_transforms

    impls = [make_impl(), make_impl()]
    model = model_of(*impls)
    change(model.layers[0].self_attn)
    assign_key_transforms(model, torch.float32)
    treatments = [impl.key_transform.treatment for impl in impls]
    assert treatments == ["hadamard", "channel_scale_hadamard"]
    (warning,) = warnings
    expected = rf"layers\.0\.self_attn\.attn\b.*{UNKNOWN[change]}"
    assert re.search(expected, warning)

    model = model_of(make_impl("channel_scale"))
    change(model.layers[0].self_attn)
    expected = rf"key_treatment=channel_scale .*{expected}.*Possible: auto, none"
    with pytest.raises(UnsupportedError, match=expected):
        assign_key_transforms(model, torch.float32)


def test_layers_without_rope_have_no_pairs(make_impl: Any) -> None:
    model = model_of(make_impl())
    model.layers[0].self_attn.rotary_emb = None
    assert read(model).rotary is None


@pytest.mark.parametrize(
    "treatment", ["none", "channel_scale", "hadamard", "channel_scale_hadamard"]
)
def test_a_named_treatment_is_taken(make_impl: Any, treatment: str) -> None:
    from polykv_vllm.attention.key_treatment import assign_key_transforms

    impl = make_impl(treatment)
    model = model_of(impl)
    assign_key_transforms(model, torch.float32)
    assert impl.key_transform.treatment == treatment
    if "scale" in treatment:
        assert torch.equal(impl.key_transform.scales, channel_scales(read(model)))


def test_the_transform_is_used(make_impl: Any) -> None:
    """What was stored and read before is not what is stored and read after."""
    impl = make_impl("channel_scale")
    key, value = torch.randn(2, 20, KV_HEADS, HEAD_SIZE)
    shape = (1, KV_HEADS, 32, impl.fmt.slot_bytes(HEAD_SIZE))
    caches = []
    for _ in range(2):
        cache = torch.zeros(shape, dtype=torch.uint8)
        impl.do_kv_cache_update(None, key, value, cache, torch.arange(20))
        caches.append(cache)
        from polykv_vllm.attention.key_treatment import assign_key_transforms

        assign_key_transforms(model_of(impl), torch.float32)
    assert not torch.equal(*caches)


@pytest.mark.parametrize("treatment", ["none", "auto", "hadamard", "channel_scale"])
def test_a_loader_that_was_not_seen(
    make_impl: Any, treatment: str, warnings: list[str]
) -> None:
    from polykv_vllm.attention.key_treatment import require_key_transforms

    impl = make_impl(treatment)
    layers = {"a": SimpleNamespace(impl=impl), "b": None}
    if treatment == "channel_scale":
        with pytest.raises(UnsupportedError, match=r"channel_scale .* a and 0 other"):
            require_key_transforms(layers)
    else:
        require_key_transforms(layers)
        assert impl.key_transform.rotate == (treatment != "none")
    assert len(warnings) == (treatment == "auto")
