# SPDX-License-Identifier: Apache-2.0
"""Slots, skipped tokens and poisoned tokens of the reference cache."""

import pytest
import torch

from polykv_vllm.formats import FORMATS, FormatSpec
from polykv_vllm.reference.cache import gather, reshape_and_cache
from polykv_vllm.reference.quantize import (
    dequantize_key,
    dequantize_value,
    quantize_key,
    quantize_value,
)
from tests.kernel_cases import new_cache

FORMAT_LIST = list(FORMATS.values())


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_gather_returns_what_was_stored(fmt: FormatSpec, block_size: int) -> None:
    blocks = torch.tensor([3, 1, 4])
    length = 2 * block_size + 5
    key, value = torch.randn(2, length, 3, 64)
    cache = new_cache(fmt, 64, block_size, 5, 3)
    token = torch.arange(length)
    slots = blocks[token // block_size] * block_size + token % block_size
    order = torch.randperm(length)
    reshape_and_cache(key[order], value[order], cache, slots[order], fmt)
    got_key, got_value = gather(cache, blocks, length, 64, fmt)
    assert torch.equal(got_key, dequantize_key(quantize_key(key, fmt)))
    expected = dequantize_value(quantize_value(value, fmt), fmt)
    assert torch.equal(got_value, expected)


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
def test_negative_slots_write_nothing(fmt: FormatSpec) -> None:
    cache = new_cache(fmt, 64, 16, 2, 2)
    before = cache.clone()
    key, value = torch.randn(2, 3, 2, 64)
    reshape_and_cache(key, value, cache, torch.tensor([-1, -1, -5]), fmt)
    assert torch.equal(cache, before)


def stored_and_gathered(
    fmt: FormatSpec, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass `[2, 4 tokens, 2 heads, 64]` keys and values through a cache."""
    cache = new_cache(fmt, 64, 16, 1, 2)
    reshape_and_cache(rows[0], rows[1], cache, torch.arange(4), fmt)
    return gather(cache, torch.tensor([0]), 4, 64, fmt)


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_one_bad_element_poisons_its_token_and_head(
    fmt: FormatSpec, poison: float, part: int
) -> None:
    rows = torch.randn(2, 4, 2, 64)
    clean = rows.clone()
    rows[part, 2, 1, 9] = poison
    got, expected = (stored_and_gathered(fmt, x) for x in (rows, clean))
    for bad, good in zip(got, expected, strict=True):
        assert bad[2, 1].isnan().all()
        bad[2, 1] = good[2, 1]
        assert torch.equal(bad, good)
