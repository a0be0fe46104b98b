# SPDX-License-Identifier: Apache-2.0
"""Reading a shared segment once for all its readers changes no bit of any result."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm import ops
from polykv_vllm.formats import SUPPORTED_HEAD_DIMS, FormatSpec
from tests.forest_cases import (
    Node,
    Reader,
    forests,
    make_forest_batch,
    make_tables,
)
from tests.kernel_cases import CPP_ISAS, FASTEST, FORMAT_LIST, Batch, worst_ratio

ISAS = pytest.mark.parametrize("isa", CPP_ISAS)

# Two groups with different prompts; the first one nested; a loner; a verification of
# drafts, a prefill, and a prompt that is shared as a whole.
NODES = [Node(None, 41), Node(0, 7), Node(0, 20), Node(None, 36)]
READERS = [
    Reader(1, 40, 1),
    Reader(3, 5, 1),
    Reader(2, 64, 4),
    Reader(1, 70, 20),
    Reader(None, 300, 1),
    Reader(2, 200, 1),
    Reader(3, 1, 1),
    Reader(0, 0, 1),
    Reader(0, 33, 0),
    Reader(3, 90, 90),
]


def mixed_batch(fmt: FormatSpec, window: int = -1, **shape: Any) -> Batch:
    tables = make_tables(NODES, READERS, 32)
    return make_forest_batch(tables, fmt, 32, window=window, **shape)


@ISAS
@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
@pytest.mark.parametrize("window", [-1, 300])
def test_mixed_batch(isa: str, fmt: FormatSpec, window: int) -> None:
    batch = mixed_batch(fmt, window, kv_heads=2)
    forest = batch.forest()
    assert len(forest) > 2
    assert torch.equal(batch.run(isa, forest=forest), batch.run(isa))


@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shapes(head_dim: int, group: int, dtype: torch.dtype) -> None:
    batch = mixed_batch(FORMAT_LIST[0], head_dim=head_dim, group=group, dtype=dtype)
    assert torch.equal(batch.run(FASTEST, forest=batch.forest()), batch.run(FASTEST))


@ISAS
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    fmt=st.sampled_from(FORMAT_LIST),
    block_size=st.sampled_from([32, 128]),
    group=st.sampled_from([1, 3, 7]),
    window=st.sampled_from([-1, -1, 100, 513]),
    threads=st.sampled_from([1, 2, 3]),
    order=st.randoms(use_true_random=False),
)
def test_random_forests(
    isa: str,
    data: Any,
    fmt: FormatSpec,
    block_size: int,
    group: int,
    window: int,
    threads: int,
    order: Any,
) -> None:
    """Any forest, number of threads and order of the batch."""
    nodes, readers = data.draw(forests(block_size))
    tables = make_tables(nodes, readers, block_size)
    batch = make_forest_batch(tables, fmt, block_size, group=group, window=window)
    expected = batch.run(isa)
    assert torch.equal(batch.run(isa, threads, batch.forest()), expected)
    requests = list(range(len(readers)))
    order.shuffle(requests)
    shuffled = batch.select(requests)
    rows = torch.cat([expected[batch.rows(r)] for r in requests])
    assert torch.equal(shuffled.run(isa, threads, shuffled.forest()), rows)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("agents", [2, 15, 70])
def test_long_prefix_over_threads(threads: int, agents: int) -> None:
    """A long segment is split among threads where its passes are few."""
    tables = make_tables([Node(None, 13)], [Reader(0, 9, 1)] * agents, 128)
    batch = make_forest_batch(tables, FORMAT_LIST[1], 128, kv_heads=1)
    forest = batch.forest()
    assert forest.segments.tolist() == [[0, 13, 0, agents]]
    assert torch.equal(batch.run(FASTEST, threads, forest), batch.run(FASTEST))


def test_against_the_oracle() -> None:
    """Not only equal to the unshared path: right."""
    batch = mixed_batch(FORMAT_LIST[0])
    assert worst_ratio(batch, batch.run(FASTEST, 2, batch.forest())) <= 1


def test_part_of_the_forest() -> None:
    """Any subset of the segments is a valid plan: what is left out is read alone."""
    batch = mixed_batch(FORMAT_LIST[0])
    forest, expected = batch.forest(), batch.run(FASTEST)
    for keep in range(2 ** len(forest)):
        chosen = [i for i in range(len(forest)) if keep >> i & 1]
        part = replace(forest, segments=forest.segments[chosen].contiguous())
        assert torch.equal(batch.run(FASTEST, forest=part), expected)


def test_nan_of_one_reader_stays_with_it() -> None:
    batch = mixed_batch(FORMAT_LIST[0])
    expected = batch.run(FASTEST)
    rows = batch.rows(3)
    batch.query[rows.start] = torch.nan
    got = batch.run(FASTEST, forest=batch.forest())
    assert got[rows.start].isnan().all()
    others = [i for i in range(len(got)) if i != rows.start]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ([0, 2, 0, 2], "requests 0 and 1 do not share the blocks"),
        ([0, 0, 0, 1], "has tiles 0..0"),
        ([-1, 1, 0, 1], "has tiles -1..1"),
        ([0, 1, 0, 9], "readers 0..9"),
        ([0, 1, -1, 1], "readers -1..0"),
        ([0, 99, 0, 1], "of tiles 0..99 does not fit request 0"),
        # Its 1,576 tokens end inside the thirteenth tile.
        ([0, 13, 0, 1], "of tiles 0..13 does not fit request 0"),
    ],
)
def test_a_wrong_forest_is_refused(segment: list[int], message: str) -> None:
    tables = make_tables(NODES, READERS[:3], 32)
    batch = make_forest_batch(tables, FORMAT_LIST[0], 32)
    wrong = ops.PrefixForest(
        torch.tensor([segment], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        ops.SharingCounts(),
    )
    with pytest.raises(ValueError, match=message):
        batch.run(FASTEST, forest=wrong)


def test_overlapping_segments_are_refused() -> None:
    tables = make_tables(NODES, READERS[:3], 32)
    batch = make_forest_batch(tables, FORMAT_LIST[0], 32)
    segments = torch.tensor([[0, 2, 0, 1], [1, 3, 0, 1]], dtype=torch.int32)
    readers = torch.tensor([0], dtype=torch.int32)
    wrong = ops.PrefixForest(segments, readers, ops.SharingCounts())
    with pytest.raises(ValueError, match=r"segment 1 of tiles 1\.\.3 does not"):
        batch.run(FASTEST, forest=wrong)
