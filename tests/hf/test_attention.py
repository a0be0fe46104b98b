# SPDX-License-Identifier: Apache-2.0
"""Attention over the packed cache against the oracle, in whole models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import FORMATS, get_format
from polykv_vllm.hf import PolyKVCache
from polykv_vllm.hf.layer import PackedLayer
from polykv_vllm.keys import KeyTransform
from polykv_vllm.reference.attention import attention
from polykv_vllm.reference.cache import gather
from tests.hf.models import FAMILIES, WINDOW, tiny_model, tokens


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Return what every layer was asked and answered, in order."""
    seen: list[dict[str, Any]] = []
    attend = PackedLayer.attend

    def recording(
        self: PackedLayer, query: torch.Tensor, mask: Any, scale: float, window: int
    ) -> torch.Tensor:
        output = attend(self, query, mask, scale, window)
        seen.append(
            {"query": query, "output": output, "scale": scale, "window": window}
        )
        return output

    monkeypatch.setattr(PackedLayer, "attend", recording)
    yield seen


def oracle(cache: PolyKVCache, layer: int, call: dict[str, Any]) -> torch.Tensor:
    """Return `[tokens, heads, head_dim]` of the only row, from the stored bytes."""
    (table,) = cache.sequences.tables
    store = cache.store
    key, value = gather(
        store.layers[layer],
        torch.tensor(table),
        cache.get_seq_length(),
        store.head_dim,
        store.fmt,
    )
    query = call["query"][0].transpose(0, 1)
    return attention(query, key, value, call["scale"], call["window"])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_attends_to_its_packed_tokens(
    family: str, fmt: str, calls: list[dict[str, Any]]
) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("polykv")
    cache = PolyKVCache(model.config, fmt, block_size=16)
    for chunk in tokens(90).split([70, 19, 1], dim=1):
        calls.clear()
        model(chunk, past_key_values=cache)
        assert len(calls) == 3
        for layer, call in enumerate(calls):
            expected = oracle(cache, layer, call)
            torch.testing.assert_close(
                call["output"][0], expected, rtol=5e-3, atol=5e-3
            )
    windows = [call["window"] for call in calls]
    assert windows == ([WINDOW, -1, WINDOW] if family == "gemma3" else [-1] * 3)
    expected_scale = 80**-0.5 if family == "gemma3" else 64**-0.5
    assert calls[0]["scale"] == pytest.approx(expected_scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_attention_gets_the_same_keys_and_values(family: str) -> None:
    """sdpa over the dequantized cache: an attention that is not ours at all."""
    model = tiny_model(family, num_hidden_layers=1) if family != "gemma3" else None
    model = model or tiny_model(family)
    logits = []
    for implementation in ("polykv", "sdpa"):
        model.set_attn_implementation(implementation)
        cache = PolyKVCache(model.config, "polykv_k8v8")
        chunks = tokens(90).split([70, 20], dim=1)
        logits.append(
            torch.cat([model(c, past_key_values=cache).logits for c in chunks], 1)
        )
    difference = (logits[0] - logits[1]).norm() / logits[1].norm()
    # Two layers on, a code of the cache may round the other way: Gemma has three.
    assert difference < (0.03 if family == "gemma3" else 0.005)


def test_the_cache_is_near_the_uncompressed_one() -> None:
    model = tiny_model("llama")
    ids = tokens(90)
    exact = model(ids).logits
    model.set_attn_implementation("polykv")
    errors = {}
    for fmt in ("polykv_k8v8", "polykv_k7v4", "polykv_k8v3"):
        logits = model(ids, past_key_values=PolyKVCache(model.config, fmt)).logits
        errors[fmt] = float((logits - exact).norm() / exact.norm())
    assert errors["polykv_k8v8"] < 0.05
    assert errors["polykv_k8v8"] < errors["polykv_k7v4"] < errors["polykv_k8v3"] < 0.6


@pytest.mark.parametrize("implementation", ["polykv", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_rows_equal_rows_alone(family: str, implementation: str) -> None:
    model = tiny_model(family)
    model.set_attn_implementation(implementation)
    lengths, ids = (70, 33, 5), tokens(80, rows=3)
    mask = torch.zeros(3, 80)
    for row, length in enumerate(lengths):
        mask[row, 80 - length :] = 1
    cache = PolyKVCache(model.config, "polykv_k8v8")
    cache.expect_padding(mask)
    together = model.generate(
        ids,
        attention_mask=mask.long(),
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
    )[:, 80:]
    assert [len(table) for table in cache.sequences.tables] == [3, 2, 1]
    for row, length in enumerate(lengths):
        alone = model.generate(
            ids[row : row + 1, 80 - length :],
            attention_mask=torch.ones(1, length).long(),
            past_key_values=PolyKVCache(model.config, "polykv_k8v8"),
            do_sample=False,
            max_new_tokens=8,
            min_new_tokens=8,
        )[:, length:]
        assert torch.equal(together[row : row + 1], alone)


def random_transforms(layers: int) -> list[KeyTransform]:
    return [
        KeyTransform(torch.rand(2, 64) + 0.5, rotate=bool(layer % 2))
        for layer in range(layers)
    ]


@pytest.mark.parametrize("implementation", ["polykv", "sdpa"])
def test_a_key_treatment_keeps_the_products(implementation: str) -> None:
    model = tiny_model("qwen2")
    ids = tokens(70)
    exact = model(ids).logits
    model.set_attn_implementation(implementation)
    plain = PolyKVCache(model.config, "polykv_k8v8")
    treated = PolyKVCache(
        model.config, "polykv_k8v8", key_transforms=random_transforms(3)
    )
    for cache in (plain, treated):
        logits = model(ids, past_key_values=cache).logits
        assert (logits - exact).norm() / exact.norm() < 0.06
    codes = [c.store.layers[0][:, :, :, :64] for c in (plain, treated)]
    assert not torch.equal(*codes)


def test_the_packed_attention_needs_the_packed_cache() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("polykv")
    with pytest.raises(
        UnsupportedError, match=r"past_key_values=PolyKVCache.for_model"
    ):
        model(tokens(5), use_cache=False)
    with pytest.raises(UnsupportedError, match="PolyKVCache"):
        model(tokens(5))


@pytest.mark.parametrize(
    "mask",
    [[[0, 1, 1, 1]], [[1, 0, 1, 1]], [[1, 1, 1, 0]]],
    ids=["not announced", "in the middle", "at the right"],
)
def test_masks_that_the_cache_does_not_know_are_refused(mask: list[list[int]]) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("polykv")
    cache = PolyKVCache(model.config)
    with pytest.raises(UnsupportedError, match="expect_padding"):
        model(tokens(4), attention_mask=torch.tensor(mask), past_key_values=cache)


def test_announced_padding_must_be_in_the_mask() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("polykv")
    cache = PolyKVCache(model.config)
    cache.expect_padding(torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(UnsupportedError, match="hides other tokens"):
        model(tokens(4), past_key_values=cache)


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[1, 1, 0]], [[0, 0, 0]]])
def test_only_padding_at_the_left_can_be_announced(mask: list[list[int]]) -> None:
    cache = PolyKVCache(tiny_model("llama").config)
    with pytest.raises(UnsupportedError, match="padding at the left"):
        cache.expect_padding(torch.tensor(mask))


def test_gradients_are_refused() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("polykv")
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="gradients"):
        model(tokens(4), past_key_values=PolyKVCache(model.config))


def test_formats_have_the_names_of_the_engine() -> None:
    config = tiny_model("llama").config
    assert PolyKVCache(config, "polykv").fmt == get_format("polykv_k8v3")
    with pytest.raises(ValueError, match="available: polykv"):
        PolyKVCache(config, "int4")


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"head_dim": 48}, "does not support head size 48"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_models_that_cannot_be_served_are_refused(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        PolyKVCache(tiny_model(family, **changes).config)
