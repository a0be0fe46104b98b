# SPDX-License-Identifier: Apache-2.0
"""Finding what a batch shares: csrc/forest.cpp against the oracle, and its counts."""

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm import ops
from polykv_vllm.reference.forest import MAX_ROWS, Segment, shared_segments
from polykv_vllm.reference.forest import TILE_TOKENS as ORACLE_TILE
from tests.forest_cases import Node, Reader, Tables, forests, make_tables

PROMPT = [Node(None, 4)]  # four blocks of 128


def find(
    tables: Tables, block_size: int, group: int = 3, window: int = -1
) -> ops.PrefixForest:
    return ops.build_prefix_forest(
        tables.block_table,
        torch.tensor(tables.seq_lens, dtype=torch.int32),
        torch.tensor([0, *tables.query_lens]).cumsum(0).int(),
        block_size,
        group,
        window,
    )


def as_segments(forest: ops.PrefixForest) -> list[Segment]:
    readers = forest.readers.tolist()
    return sorted(
        (begin, end, tuple(readers[first : first + count]))
        for begin, end, first, count in forest.segments.tolist()
    )


def expected(
    tables: Tables, block_size: int, group: int = 3, window: int = -1
) -> list[Segment]:
    lists = tables.block_table.tolist()
    lens = (tables.seq_lens, tables.query_lens)
    return shared_segments(lists, *lens, block_size, group, window)


def test_constants_agree() -> None:
    assert ops.TILE_TOKENS == ORACLE_TILE
    # Two of 32 rows are one pass, two of 33 are two: nothing to save.
    for queries, shares in ((MAX_ROWS // 2, True), (MAX_ROWS // 2 + 1, False)):
        readers = [Reader(0, queries, queries)] * 2
        assert bool(find(make_tables(PROMPT, readers, 128), 128, group=1)) is shares


def test_long_prefills_read_for_themselves() -> None:
    """64 rows fill a pass: stacking them would save none and cost their states."""
    readers = [Reader(0, 80, queries) for queries in (1, 64, 63, 1, 70)]
    forest = find(make_tables(PROMPT, readers, 128), 128, group=1)
    assert as_segments(forest) == [(0, 4, (0, 2, 3))]
    assert forest.counts.no_gain_pairs == (64 + 70) * 4 * 128


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    block_size=st.sampled_from([16, 32, 128, 256]),
    group=st.sampled_from([1, 3, 8]),
    window=st.sampled_from([-1, -1, 40, 128, 300, 513]),
)
def test_as_the_oracle(data: Any, block_size: int, group: int, window: int) -> None:
    nodes, readers = data.draw(forests(block_size, 1500))
    tables = make_tables(nodes, readers, block_size)
    found = find(tables, block_size, group, window)
    assert as_segments(found) == expected(tables, block_size, group, window)


def visible_pairs(seq_len: int, queries: int, window: int) -> int:
    seen = range(seq_len - queries + 1, seq_len + 1)
    return sum(min(s, window) if window > 0 else s for s in seen)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    block_size=st.sampled_from([32, 128]),
    window=st.sampled_from([-1, 40, 300]),
)
def test_counts_add_up(data: Any, block_size: int, window: int) -> None:
    nodes, readers = data.draw(forests(block_size, 1500))
    tables = make_tables(nodes, readers, block_size)
    counts = find(tables, block_size, window=window).counts
    segments = expected(tables, block_size, window=window)
    lens = list(zip(tables.seq_lens, tables.query_lens, strict=True))
    shared = 0
    for begin, end, members in segments:
        for request in members:
            length, queries = lens[request]
            for seen in range(length - queries + 1, length + 1):
                first = max(begin * 128, seen - window if window > 0 else 0)
                last = min(end * 128, length - queries)
                shared += max(0, last - first)
    assert counts.shared_pairs == shared
    assert counts.shared_pairs + counts.own_token_pairs + counts.no_gain_pairs + (
        counts.no_other_reader_pairs
    ) == sum(visible_pairs(*pair, window) for pair in lens)
    tokens = [(end - begin) * 128 for begin, end, _ in segments]
    readers_of = [len(members) for *_, members in segments]
    assert counts.physical_tokens == sum(tokens)
    assert counts.logical_tokens == sum(
        t * r for t, r in zip(tokens, readers_of, strict=True)
    )
    assert counts.max_readers == max(readers_of, default=0)


def test_nested_prefixes() -> None:
    """Organisation > two teams > private: the deepest shared part counts."""
    nodes = [Node(None, 8), Node(0, 4), Node(0, 2)]
    readers = [Reader(1, 64, 1)] * 3 + [Reader(2, 64, 1)] * 2 + [Reader(0, 64, 1)]
    forest = find(make_tables(nodes, readers, 128), 128)
    assert as_segments(forest) == [
        (0, 8, (0, 1, 2, 3, 4, 5)),
        (8, 10, (3, 4)),
        (8, 12, (0, 1, 2)),
    ]
    assert forest.counts.distinct_prefixes == 2
    assert forest.counts.max_readers == 6


def test_a_prefix_that_ends_inside_a_tile() -> None:
    """Three blocks of 32 tokens are short of a tile; five begin a second one."""
    readers = [Reader(0, 10, 1)] * 2
    assert not find(make_tables([Node(None, 3)], readers, 32), 32)
    forest = find(make_tables([Node(None, 5)], readers, 32), 32)
    assert as_segments(forest) == [(0, 1, (0, 1))]


def test_identical_prompts_being_computed() -> None:
    """Queries see part of the tile in which they lie: it is theirs alone."""
    readers = [Reader(0, 0, 10)] * 3
    assert as_segments(find(make_tables(PROMPT, readers, 128), 128)) == [
        (0, 3, (0, 1, 2))
    ]


def test_windows_of_different_ages() -> None:
    """vLLM frees blocks that left a window: their entries become 0."""
    tables = make_tables(PROMPT, [Reader(0, 10, 1), Reader(0, 200, 1)], 128)
    tables.block_table[0, 0] = 0
    tables.block_table[1, :2] = 0
    assert as_segments(find(tables, 128, window=400)) == [(2, 4, (0, 1))]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([40, 128, 200, 300, 513]),
)
def test_entries_that_left_the_window(data: Any, block_size: int, window: int) -> None:
    """Of some requests they are 0, of others still what they were, in any tile."""
    nodes, readers = data.draw(forests(block_size, 1500))
    tables = make_tables(nodes, readers, block_size)
    lens = zip(tables.seq_lens, tables.query_lens, strict=True)
    for request, (length, queries) in enumerate(lens):
        first_seen = max(0, length - queries + 1 - window)
        if data.draw(st.booleans()):
            tables.block_table[request, : first_seen // block_size] = 0
    found = find(tables, block_size, 1, window)
    assert as_segments(found) == expected(tables, block_size, 1, window)


def test_tables_that_become_equal_inside_a_tile() -> None:
    """The first request has computed all blocks, the others found a window's alone."""
    readers = [Reader(0, 64, 1)] * 4
    tables = make_tables([Node(None, 16)], readers, 32)
    tables.block_table[1:, :10] = 0
    forest = find(tables, 32, window=200)  # from 377: in the third tile, twelfth block
    assert as_segments(forest) == [(2, 3, (1, 2, 3)), (3, 4, (0, 1, 2, 3))]


def test_empty_batches() -> None:
    assert not find(make_tables(PROMPT, [], 128), 128)
    padding = [Reader(0, 5, 0)] * 2
    forest = find(make_tables(PROMPT, padding, 128), 128)
    assert not forest
    assert forest.counts == ops.SharingCounts()


@pytest.mark.parametrize("length", [-1, 0, 2**31 - 1])
def test_the_length_of_padding_is_not_looked_at(length: int) -> None:
    readers = [Reader(0, 5, 1), Reader(0, 5, 0), Reader(0, 9, 1), Reader(0, 5, 0)]
    tables = make_tables(PROMPT, readers, 128)
    tables.seq_lens[1] = tables.seq_lens[3] = length
    assert as_segments(find(tables, 128)) == [(0, 4, (0, 2))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 2)}, "block_table must be torch.int32"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, "3 requests with 3"),
        ({"block_size": 16}, "70 tokens do not fit 2 blocks of 16"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    arguments = {
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([70, 5], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "block_size": 64,
        "group": 3,
    }
    ops.build_prefix_forest(**arguments)
    with pytest.raises(ValueError, match=message):
        ops.build_prefix_forest(**arguments | change)


def test_cost_is_linear_in_what_is_shared() -> None:
    """Of 512 blocks each: 64 requests that share all, 64 that share nothing, and 512.

    Not a benchmark: the bound is ten times what the last takes, so that only another
    order of growth exceeds it.
    """
    shared = make_tables([Node(None, 512)], [Reader(0, 64, 1)] * 64, 128)
    private = make_tables(PROMPT, [Reader(None, 512 * 128, 1)] * 64, 128)
    # Two with one prompt, and 510 strangers beside them, whose blocks lie in a row.
    strangers = make_tables([], [Reader(None, 512 * 128, 1)] * 512, 128)
    order = torch.arange(512 * 512, dtype=torch.int32).reshape(512, 512)
    strangers.block_table[:, :512] = order
    strangers.block_table[300, :511] = strangers.block_table[17, :511]
    for tables, segments in ((shared, 1), (private, 0), (strangers, 1)):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            assert len(find(tables, 128)) == segments
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.03
