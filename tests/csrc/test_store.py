# SPDX-License-Identifier: Apache-2.0
"""Every store writes the bytes of the reference, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm import ops
from polykv_vllm.formats import SUPPORTED_HEAD_DIMS, FormatSpec
from polykv_vllm.reference.pack import unpack_tile
from tests.kernel_cases import ALL_ISAS, CPP_ISAS, DTYPES, FORMAT_LIST, new_cache
from tests.row_strategies import maybe_poisoned

NAMED = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
ISAS = pytest.mark.parametrize("isa", CPP_ISAS)


def stored(
    isa: str,
    fmt: FormatSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    num_threads: int = 1,
) -> torch.Tensor:
    """Store into a copy of `cache` and return it."""
    cache = cache.clone()
    ops.reshape_and_cache(
        key, value, cache, slots, fmt, isa=isa, num_threads=num_threads
    )
    return cache


def assert_equal_bytes(
    isa: str,
    fmt: FormatSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
) -> None:
    """Compare a store with the reference, unwritten garbage included."""
    blocks = int(slots.max()) // block_size + 2
    heads, head_dim = key.shape[1:]
    cache = new_cache(fmt, head_dim, block_size, blocks, heads)
    expected = stored("reference", fmt, key, value, slots, cache)
    assert torch.equal(stored(isa, fmt, key, value, slots, cache), expected)


@ISAS
@NAMED
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_equal_the_reference(
    isa: str, fmt: FormatSpec, head_dim: int, dtype: torch.dtype
) -> None:
    """Case 2: every byte of every token, at head sizes of all kinds."""
    key, value = torch.randn(2, 37, 2, head_dim).to(dtype)
    slots = torch.randperm(64)[:37]
    assert_equal_bytes(isa, fmt, key, value, slots, block_size=32)


@ISAS
@NAMED
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_block_sizes_and_heads(
    isa: str, fmt: FormatSpec, block_size: int, heads: int
) -> None:
    key, value = torch.randn(2, 20, heads, 64)
    slots = torch.randperm(2 * block_size)[:20]
    assert_equal_bytes(isa, fmt, key, value, slots, block_size)


@ISAS
@NAMED
def test_rows_with_strides_of_their_own(isa: str, fmt: FormatSpec) -> None:
    """Keys and values as views of a fused projection, and with heads outermost."""
    fused = torch.randn(19, 9, 64).to(torch.bfloat16)
    transposed = torch.randn(3, 19, 80)[:, :, 7:71].transpose(0, 1)
    for key, value in (
        (fused[:, 3:6], fused[:, 6:9]),
        (transposed, torch.randn(19, 3, 64)),
        (torch.randn(38, 3, 64)[::2], transposed),
    ):
        assert_equal_bytes(isa, fmt, key, value, torch.randperm(48)[:19], 48)


@ISAS
@NAMED
def test_skipped_slots_and_padding_rows(isa: str, fmt: FormatSpec) -> None:
    key, value = torch.randn(2, 30, 2, 64)
    slots = torch.randperm(32)[:24]
    slots[[0, 5, 23]] = torch.tensor([-1, -7, -1])
    key[24:] = torch.nan  # rows beyond the slots are the engine's padding
    assert_equal_bytes(isa, fmt, key, value, slots, 32)


@ISAS
def test_int32_slot_mapping(isa: str) -> None:
    fmt = FORMAT_LIST[0]
    key, value = torch.randn(2, 16, 2, 64)
    cache = new_cache(fmt, 64, 32, 1, 2)
    slots = torch.randperm(32)[:16]
    expected = stored(isa, fmt, key, value, slots, cache)
    assert torch.equal(stored(isa, fmt, key, value, slots.int(), cache), expected)


@settings(max_examples=40)
@given(st.data(), st.sampled_from(FORMAT_LIST))
def test_extreme_rows(data: st.DataObject, fmt: FormatSpec) -> None:
    """Case 3: norms from subnormal to bf16's maximum, infs and NaNs: same bytes."""
    head_dim = data.draw(st.sampled_from(fmt.head_dims))
    row = maybe_poisoned(head_dim)
    key, value = (
        torch.stack(data.draw(st.lists(row, min_size=4, max_size=4))).view(4, 1, -1)
        for _ in range(2)
    )
    if data.draw(st.booleans()):
        key, value = key.to(torch.bfloat16), value.to(torch.bfloat16)
    cache = torch.zeros(1, 1, 16, fmt.slot_bytes(head_dim), dtype=torch.uint8)
    slots = torch.tensor([3, 0, 15, 8])
    expected = stored("reference", fmt, key, value, slots, cache)
    for isa in CPP_ISAS:
        got = stored(isa, fmt, key, value, slots, cache)
        for part in zip(
            unpack_tile(got.reshape(-1), head_dim, fmt),
            unpack_tile(expected.reshape(-1), head_dim, fmt),
            strict=True,
        ):
            assert torch.equal(part[0].codes, part[1].codes), isa
        assert torch.equal(got, expected), isa


@pytest.mark.parametrize("isa", ALL_ISAS)
@NAMED
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_poisoned_token_has_two_nan_scales(
    isa: str, fmt: FormatSpec, poison: float, part: int
) -> None:
    """Case 5: the token's own, and no other's."""
    rows = torch.randn(2, 3, 2, 128)
    rows[part, 1, 0, 127] = poison
    cache = new_cache(fmt, 128, 16, 1, 2)
    cache = stored(isa, fmt, rows[0], rows[1], torch.arange(3), cache)
    for head in range(2):
        for got in unpack_tile(cache[0, head].reshape(-1), 128, fmt):
            nan = got.scale[:3].isnan().tolist()
            assert nan == [False, head == 0, False]


@pytest.mark.parametrize("isa", ALL_ISAS)
@NAMED
def test_zeros_are_stored_as_zeros(isa: str, fmt: FormatSpec) -> None:
    zeros = torch.zeros(16, 1, 64)
    zeros[::2] = -0.0
    cache = stored(
        isa, fmt, zeros, zeros, torch.arange(16), new_cache(fmt, 64, 16, 1, 1)
    )
    for got in unpack_tile(cache.reshape(-1), 64, fmt):
        assert torch.equal(got.scale, torch.zeros(16, dtype=torch.bfloat16))


@ISAS
@NAMED
def test_threads_and_batches_do_not_matter(isa: str, fmt: FormatSpec) -> None:
    """All at once with one or two threads, or token by token in any order."""
    key, value = torch.randn(2, 90, 2, 64).to(torch.bfloat16)
    slots = torch.randperm(96)[:90]
    cache = new_cache(fmt, 64, 32, 3, 2)
    expected = stored(isa, fmt, key, value, slots, cache)
    assert torch.equal(stored(isa, fmt, key, value, slots, cache, 2), expected)
    for t in torch.randperm(90).tolist():
        one = slice(t, t + 1)
        ops.reshape_and_cache(key[one], value[one], cache, slots[one], fmt, isa=isa)
    assert torch.equal(cache, expected)
