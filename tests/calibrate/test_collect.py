# SPDX-License-Identifier: Apache-2.0
"""Statistics against their definition, computed with autograd and loops."""

from pathlib import Path

import pytest
import torch

from polykv_vllm.calibrate.attention_aware import aware_sums
from polykv_vllm.calibrate.collect import collect
from polykv_vllm.calibrate.statistics import HeadSums, Statistics, output_gram
from tests.calibrate.models import random_sequences
from tests.hf.models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sums_are_of_what_a_cache_sees(family: str, tmp_path: Path) -> None:
    """Keys and values as transformers' own cache holds them; all sequences."""
    from transformers import DynamicCache

    model = tiny_model(family)
    before = model.config._attn_implementation
    sequences = random_sequences(model.config.vocab_size, 2, 40)
    found = collect(model, sequences)
    assert model.config._attn_implementation == before
    assert (found.sequences, found.tokens, len(found.layers)) == (2, 80, 3)
    for kind, name in (("keys", "key"), ("values", "value")):
        expected = torch.zeros_like(found.stacked(name))
        seen = []
        for tokens in sequences:
            cache = DynamicCache()
            with torch.inference_mode():
                model(torch.tensor([tokens]), past_key_values=cache)
            states = torch.stack([getattr(x, kind)[0] for x in cache.layers]).double()
            expected += states.mT @ states
            seen.append(states)
        keys = torch.cat(seen, -2)
        torch.testing.assert_close(found.stacked(name), expected, rtol=1e-4, atol=1e-2)
        if name == "key":
            centred = keys - keys.mean(-2, keepdim=True)
            torch.testing.assert_close(
                found.centred_keys(), centred.mT @ centred, rtol=1e-4, atol=1e-2
            )
            torch.testing.assert_close(
                found.key_mean(), keys.mean(-2), rtol=1e-4, atol=1e-4
            )
    found.save(tmp_path / "sums")
    read = Statistics.load(tmp_path / "sums")
    assert (read.sequences, read.tokens, read.aware_sequences) == (2, 80, 0)
    assert torch.equal(read.stacked("value_drawn"), found.stacked("value_drawn"))
    # Text without end takes no more memory.
    again = collect(model, sequences * 2)
    torch.testing.assert_close(again.stacked("query"), 2 * found.stacked("query"))


def test_the_output_gram_sums_a_group_of_heads() -> None:
    weight = torch.randn(32, 4 * 8)
    found = output_gram(weight, 2, 8)
    rows = weight.double().T.view(4, 8, 32)
    products = torch.stack([row @ row.T for row in rows])
    torch.testing.assert_close(
        found, torch.stack([products[:2].sum(0), products[2:].sum(0)])
    )


def test_wush_a_is_the_hessian_of_the_output() -> None:
    """Of the squared error of the layer's output, summed over tokens, by autograd."""
    torch.manual_seed(0)
    group, tokens, dim, hidden = 2, 5, 4, 6
    query = torch.randn(group, tokens, dim)
    key, value = torch.randn(2, tokens, dim)
    output = torch.randn(group, dim, hidden).double()
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def layer(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (query.double() @ k.T * 0.5).masked_fill(future, -torch.inf)
        return torch.einsum("gts,sd,gdo->to", scores.softmax(-1), v, output)

    found = aware_sums(query, key, value, 0.5, output)
    exact = (key.double(), value.double())
    for index, result in enumerate(found):
        jacobian = torch.autograd.functional.jacobian(layer, exact)[index]
        # An error of one token at a time, summed over tokens.
        expected = torch.einsum("tosd,tose->de", jacobian, jacobian)
        scale = 0.25 if index == 0 else 1.0  # of the softmax, left out
        torch.testing.assert_close(result * scale, expected, rtol=1e-4, atol=1e-5)


def test_a_text_that_is_too_short_is_told() -> None:
    model = tiny_model("llama")
    found = collect(model, random_sequences(model.config.vocab_size, 1, 20))
    places = found.rank_deficient()
    assert {name for _, _, name in places} == {"key", "query", "value"}
    assert {(layer, head) for layer, head, _ in places} == {
        (layer, head) for layer in range(3) for head in range(2)
    }
    full = HeadSums.zeros(1, 4)
    for name in ("key", "query", "value"):
        getattr(full, name).add_(torch.eye(4))
    assert Statistics([full]).rank_deficient() == []
