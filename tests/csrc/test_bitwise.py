# SPDX-License-Identifier: Apache-2.0
"""The promise: a row's result depends on the row and the cached bytes, bit for bit.

Everything here is `torch.equal`. Stock engines do not offer this.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm.formats import SUPPORTED_HEAD_DIMS, FormatSpec, TileLayout
from tests.formats.test_layout import places
from tests.kernel_cases import CPP_ISAS, DTYPES, FASTEST, FORMAT_LIST, Batch, make_batch

NAMED = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
ISAS = pytest.mark.parametrize("isa", CPP_ISAS)
# Every head size, with one of the formats; three of them with all.
SHAPES = pytest.mark.parametrize(
    ("fmt", "head_dim"),
    [
        (fmt, dim)
        for i, dim in enumerate(SUPPORTED_HEAD_DIMS)
        for j, fmt in enumerate(FORMAT_LIST)
        if dim in (64, 112, 128) or (i + j) % len(FORMAT_LIST) == 0
    ],
    ids=lambda x: str(getattr(x, "name", x)),
)

# Decodes of one to three splits, a prefill, continuations, an idle request.
MIXED = [(1, 700), (45, 45), (1, 1), (30, 550), (0, 0), (1, 129), (7, 1100)]


def assert_each_row_alone(batch: Batch, isa: str, whole: torch.Tensor) -> None:
    """Compare each request, and its first and last query alone, with the batch."""
    for request, (queries, _) in enumerate(batch.requests()):
        if queries == 0:
            continue
        rows = whole[batch.rows(request)]
        assert torch.equal(batch.select([request]).run(isa), rows)
        for row in {0, queries // 2, queries - 1}:
            alone = batch.chunk(request, row, row + 1).run(isa)
            assert torch.equal(alone[0], rows[row])


@SHAPES
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 8), (3, 3), (2, 1)])
def test_alone_or_in_a_batch(
    fmt: FormatSpec, head_dim: int, kv_heads: int, group: int
) -> None:
    batch = make_batch(fmt, MIXED, head_dim=head_dim, kv_heads=kv_heads, group=group)
    assert_each_row_alone(batch, FASTEST, batch.run(FASTEST))


@ISAS
@pytest.mark.parametrize("window", [-1, 40, 513])
def test_alone_or_in_a_batch_with_a_window(isa: str, window: int) -> None:
    batch = make_batch(FORMAT_LIST[1], MIXED[:4], window=window)
    assert_each_row_alone(batch, isa, batch.run(isa))


@ISAS
@NAMED
def test_order_of_the_batch(isa: str, fmt: FormatSpec) -> None:
    batch = make_batch(fmt, MIXED[:5], dtype=torch.bfloat16)
    whole = batch.run(isa)
    order = [3, 4, 0, 2, 1]
    got = batch.select(order).run(isa)
    assert torch.equal(got, torch.cat([whole[batch.rows(r)] for r in order]))


@NAMED
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("window", [-1, 50])
def test_chunks_of_a_prompt(fmt: FormatSpec, chunk: int, window: int) -> None:
    """All 150 tokens at once, or a few at a time over what came before."""
    batch = make_batch(fmt, [(150, 150)], kv_heads=2, group=3, window=window)
    parts = [
        batch.chunk(0, begin, min(begin + chunk, 150)).run(FASTEST)
        for begin in range(0, 150, chunk)
    ]
    assert torch.equal(torch.cat(parts), batch.run(FASTEST))


@ISAS
@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(1, 639), max_size=4, unique=True),
    fmt=st.sampled_from(FORMAT_LIST),
    group=st.sampled_from([1, 4, 7]),
    window=st.sampled_from([-1, 33, 530]),
)
def test_any_chunks(
    isa: str, cuts: list[int], fmt: FormatSpec, group: int, window: int
) -> None:
    """The last 60 of 700 tokens, cut anywhere; cuts are folded into that range."""
    batch = make_batch(fmt, [(60, 700)], kv_heads=1, group=group, window=window)
    edges = sorted({0, 60, *(cut % 60 for cut in cuts)})
    parts = [batch.chunk(0, a, b).run(isa) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat(parts), batch.run(isa))


@ISAS
@NAMED
@pytest.mark.parametrize(
    "requests", [[(1, 1400)], [(1, 700), (1, 5)], MIXED], ids=["one", "two", "many"]
)
def test_threads(isa: str, fmt: FormatSpec, requests: list[tuple[int, int]]) -> None:
    """Few requests split the sequence among threads, many split the requests."""
    batch = make_batch(fmt, requests)
    one = batch.run(isa, num_threads=1)
    for threads in (2, 3):
        assert torch.equal(batch.run(isa, num_threads=threads), one)


@pytest.mark.parametrize("isa", CPP_ISAS[1:])
@SHAPES
def test_instruction_sets(isa: str, fmt: FormatSpec, head_dim: int) -> None:
    requests = MIXED if head_dim <= 128 else MIXED[:3]  # scalar code is slow
    batch = make_batch(fmt, requests, head_dim=head_dim, group=3)
    assert torch.equal(batch.run(isa), batch.run(FASTEST))


@pytest.mark.parametrize("isa", CPP_ISAS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [-1, 100])
def test_instruction_sets_by_dtype(isa: str, dtype: torch.dtype, window: int) -> None:
    for i, group in enumerate((1, 2, 7, 8, 16)):
        fmt = FORMAT_LIST[i % len(FORMAT_LIST)]
        batch = make_batch(fmt, MIXED[:5], group=group, dtype=dtype, window=window)
        assert torch.equal(batch.run(isa), batch.run(FASTEST))


def moved(batch: Batch, num_blocks: int) -> Batch:
    """Copy the used blocks to other places of a larger cache full of garbage."""
    old = batch.kv_cache
    cache = torch.randint(0, 256, (num_blocks, *old.shape[1:]), dtype=torch.uint8)
    place = torch.randperm(num_blocks)[: old.shape[0]]
    cache[place] = old
    return replace(
        batch, kv_cache=cache, block_table=place[batch.block_table.long()].int()
    )


@ISAS
@NAMED
def test_physical_placement(isa: str, fmt: FormatSpec) -> None:
    batch = make_batch(fmt, MIXED)
    expected = batch.run(isa)
    assert torch.equal(moved(batch, 200).run(isa), expected)


@pytest.mark.parametrize("block_size", [16, 48, 128])
@NAMED
def test_block_size(fmt: FormatSpec, block_size: int) -> None:
    """Tiles of attention lie at fixed positions, whatever the blocks are."""
    key, value = torch.randn(2, 700, 2, 64)
    outputs = []
    for size in (32, block_size):
        torch.manual_seed(1)
        batch = make_batch(fmt, [(40, 700)], block_size=size, key=key, value=value)
        query = torch.randn(40, 4, 64, generator=torch.Generator().manual_seed(2))
        outputs.append(replace(batch, query=query).run(FASTEST))
    assert torch.equal(outputs[0], outputs[1])


def with_unused_bytes(batch: Batch, fill: int) -> Batch:
    """Overwrite everything but the visible tokens with `fill`, by storing them anew."""
    cache = torch.full_like(batch.kv_cache, fill)
    head_dim, block_size = batch.query.shape[-1], batch.kv_cache.shape[2]
    owned = places(TileLayout(batch.fmt, head_dim, block_size))
    for table, (queries, length) in zip(
        batch.block_table.tolist(), batch.requests(), strict=True
    ):
        first = 0
        if batch.window > 0:
            first = max(0, length - queries + 1 - batch.window)
        for token in range(first, length):
            where = sorted({byte for byte, _ in owned[token % block_size]})
            block = table[token // block_size]
            old = batch.kv_cache[block].flatten(1)[:, where]
            cache[block].view(cache.shape[1], -1)[:, where] = old
    return replace(batch, kv_cache=cache)


@ISAS
@NAMED
@pytest.mark.parametrize("window", [-1, 20])
def test_garbage_has_no_influence(isa: str, fmt: FormatSpec, window: int) -> None:
    """Case 4: unused slots, other blocks, what left the window: 0xFF (NaN) or 0."""
    batch = make_batch(fmt, [(1, 150), (10, 37), (1, 3)], kv_heads=1, window=window)
    expected = batch.run(isa)
    assert expected.isfinite().all()
    for fill in (0xFF, 0):
        assert torch.equal(with_unused_bytes(batch, fill).run(isa), expected)


@ISAS
def test_repeated_calls(isa: str) -> None:
    """Scratch memory of earlier calls, other shapes and poisoned ones included."""
    batch = make_batch(FORMAT_LIST[0], MIXED)
    expected = batch.run(isa)
    for head_dim in SUPPORTED_HEAD_DIMS:
        other = make_batch(FORMAT_LIST[1], [(40, 300)], head_dim=head_dim, group=7)
        other.query[3] = torch.nan
        other.kv_cache.fill_(0xFF)
        other.run(isa)
        assert torch.equal(batch.run(isa), expected)
