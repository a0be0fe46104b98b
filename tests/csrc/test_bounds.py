# SPDX-License-Identifier: Apache-2.0
"""Nothing is written outside what a call owns, however its tensors lie in memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm import ops
from polykv_vllm.formats import FormatSpec, TileLayout
from tests.formats.test_layout import places
from tests.kernel_cases import CPP_ISAS, DTYPES, FORMAT_LIST, Batch, make_batch

NAMED = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
ISAS = pytest.mark.parametrize("isa", CPP_ISAS)
SENTINEL = 42


def slid_bytes(like: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a buffer of sentinels and a view of `like`'s size `offset` bytes in."""
    size = like.numel() * like.element_size()
    buffer = torch.full((size + 192,), SENTINEL, dtype=torch.uint8)
    # From a 64-byte boundary on, so that `offset` is the true misalignment.
    start = -buffer.data_ptr() % 64 + 64 + offset
    inner = buffer[start : start + size]
    return buffer, inner


def slid(like: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy `like` into sentinels, `offset` elements behind a 64-byte boundary."""
    buffer, inner = slid_bytes(like, offset * like.element_size())
    view = inner.view(like.dtype).view(like.shape)
    view.copy_(like)
    return buffer, view


def assert_surroundings(buffer: torch.Tensor, view: torch.Tensor) -> None:
    """Check that every byte of `buffer` outside `view` is still a sentinel."""
    start = view.data_ptr() - buffer.data_ptr()
    size = view.numel() * view.element_size()
    outside = torch.cat([buffer[:start], buffer[start + size :]])
    assert (outside == SENTINEL).all()


def attend(batch: Batch, output: torch.Tensor, isa: str) -> None:
    """Run into a given output."""
    ops.paged_attention(
        batch.query,
        batch.kv_cache,
        output,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        batch.fmt,
        batch.scale,
        batch.window,
        isa=isa,
    )


@ISAS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_attention_between_sentinels(isa: str, dtype: torch.dtype, offset: int) -> None:
    """Output, query, cache and tables slid off every alignment."""
    fmt = FORMAT_LIST[offset % len(FORMAT_LIST)]
    batch = make_batch(fmt, [(1, 70), (9, 21), (0, 0), (1, 1)], dtype=dtype, group=3)
    expected = batch.run(isa)
    buffer, output = slid(torch.zeros_like(expected), offset)
    cache_buffer, cache = slid(batch.kv_cache.contiguous(), offset)
    query_buffer, query = slid(batch.query, offset)
    _, table = slid(batch.block_table, offset)
    _, lengths = slid(batch.seq_lens, offset)
    moved = replace(
        batch, query=query, kv_cache=cache, block_table=table, seq_lens=lengths
    )
    before = cache_buffer.clone(), query_buffer.clone()
    attend(moved, output, isa)
    assert torch.equal(output, expected)
    assert_surroundings(buffer, output)
    assert torch.equal(cache_buffer, before[0])
    assert torch.equal(query_buffer, before[1])


@ISAS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_query_and_output(isa: str, dtype: torch.dtype) -> None:
    """Heads of a fused projection in, a wider buffer out."""
    batch = make_batch(FORMAT_LIST[1], [(5, 40), (1, 17)], dtype=dtype)
    expected = batch.run(isa)
    fused = torch.randn(6, 9, 64).to(dtype)
    fused[:, 2:6] = batch.query
    wide = torch.full((6, 7, 80), SENTINEL, dtype=dtype)
    output = wide[:, 1:5, 3:67]
    attend(replace(batch, query=fused[:, 2:6]), output, isa)
    assert torch.equal(output, expected)
    output.fill_(SENTINEL)
    assert (wide == SENTINEL).all()


@ISAS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_of_nobody_stay(isa: str, head_dim: int) -> None:
    """Padding rows before, between and behind the requests' rows."""
    batch = make_batch(
        FORMAT_LIST[0], [(2, 20), (0, 9), (1, 5)], head_dim=head_dim, group=3
    )
    expected = batch.run(isa)
    query = torch.full((9, 6, head_dim), torch.nan)
    query[3:6] = batch.query
    output = torch.full_like(query, SENTINEL)
    moved = replace(batch, query=query, query_start_loc=batch.query_start_loc + 3)
    attend(moved, output, isa)
    assert torch.equal(output[3:6], expected)
    output[3:6] = SENTINEL
    assert (output == SENTINEL).all()


@ISAS
@NAMED
@pytest.mark.parametrize("offset", [0, 1, 3, 17])
def test_store_between_sentinels(isa: str, fmt: FormatSpec, offset: int) -> None:
    """A cache at an odd address, its last slot included; inputs stay as they are."""
    key, value = torch.randn(2, 10, 2, 64).to(torch.bfloat16)
    slots = torch.tensor([0, 47, 31, 16, -1, 5, 6, 7, 46, 15])
    shape = (3, 2, 16, fmt.slot_bytes(64))
    zeros = torch.zeros(shape, dtype=torch.uint8)
    expected = zeros.clone()
    ops.reshape_and_cache(key, value, expected, slots, fmt, isa=isa)
    buffer, cache = slid(zeros, offset)
    key_buffer, slid_key = slid(key, offset)
    before = key_buffer.clone()
    ops.reshape_and_cache(slid_key, value, cache, slots, fmt, isa=isa)
    assert torch.equal(cache, expected)
    assert_surroundings(buffer, cache)
    assert torch.equal(key_buffer, before)


@settings(max_examples=60)
@given(
    isa=st.sampled_from(CPP_ISAS),
    fmt=st.sampled_from(FORMAT_LIST),
    head_dim=st.sampled_from([64, 128]),
    slots=st.lists(st.integers(0, 63), min_size=1, max_size=5, unique=True),
)
def test_append_touches_its_own_bytes_only(
    isa: str, fmt: FormatSpec, head_dim: int, slots: list[int]
) -> None:
    """Bytes that the layout gives to other tokens keep what they had."""
    torch.manual_seed(sum(slots))
    shape = (2, 1, 32, fmt.slot_bytes(head_dim))
    before = torch.randint(0, 256, shape, dtype=torch.uint8)
    after = before.clone()
    key, value = torch.randn(2, len(slots), 1, head_dim)
    ops.reshape_and_cache(key, value, after, torch.tensor(slots), fmt, isa=isa)
    owned = places(TileLayout(fmt, head_dim, 32))
    own = torch.zeros(2, before[0].numel(), dtype=torch.bool)
    for slot in slots:
        own[slot // 32, [byte for byte, _ in owned[slot % 32]]] = True
    own = own.view(shape)
    assert torch.equal(after[~own], before[~own])


@ISAS
def test_empty_calls(isa: str) -> None:
    """No tokens, no requests: nothing happens."""
    fmt = FORMAT_LIST[0]
    cache = torch.randint(0, 256, (2, 1, 32, fmt.slot_bytes(64)), dtype=torch.uint8)
    before = cache.clone()
    rows = torch.empty(0, 1, 64)
    ops.reshape_and_cache(rows, rows, cache, torch.empty(0).long(), fmt, isa=isa)
    none = torch.empty(0, dtype=torch.int32)
    table = torch.empty(0, 4, dtype=torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    ops.paged_attention(rows, cache, rows, table, none, start, fmt, 0.1, isa=isa)
    assert torch.equal(cache, before)
