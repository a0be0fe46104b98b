# SPDX-License-Identifier: Apache-2.0
"""Work lists cover every (query token, split) of a batch exactly once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm.kernels.triton.config import LARGE_ROWS, small_rows
from polykv_vllm.kernels.triton.plan import (
    SPLIT_TOKENS,
    AttentionPlan,
    build_plan,
    plan_bounds,
)
from tests.forest_cases import Node, Reader, Tables, forests, make_tables

BLOCK = 128


def plan_for(
    tables: Tables, group: int, window: int, shared: bool, slack: int = 0
) -> AttentionPlan:
    """Return the plan of a batch; the host's lengths are too long by `slack`."""
    starts = torch.tensor([0, *tables.query_lens]).cumsum(0).int()
    lens = torch.tensor(tables.seq_lens, dtype=torch.int32)
    bounds = plan_bounds(lens + slack, starts, group, window)
    return build_plan(
        tables.block_table,
        lens,
        starts,
        group,
        BLOCK,
        window,
        bounds=bounds,
        share=shared,
    )


def items_of(plan: AttentionPlan, number: int | None = None) -> list[list[int]]:
    """Return the items that count, of one list or of all."""
    lists = plan.lists if number is None else [plan.lists[number]]
    return [item for work in lists for item in work.items[: int(work.count)].tolist()]


def covered(plan: AttentionPlan) -> dict[tuple[int, int], tuple[int, int]]:
    """Return {(token, split): (request whose table is used, slot)}."""
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for work in plan.lists:
        assert int(work.count) <= work.items.shape[0]
        for request, first, count, begin, end, chained in work.items[
            : int(work.count)
        ].tolist():
            assert 0 < count * plan.group <= work.rows
            for token in plan.item_tokens[first : first + count].tolist():
                base = int(plan.token_slot[token])
                for split in range(begin, end):
                    place = 0 if chained else split - int(plan.token_split[token])
                    key = (token, split)
                    assert key not in out
                    out[key] = (request, base + place)
    return out


@settings(max_examples=40, deadline=None)
@given(
    forests(BLOCK, 2500),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from([-1, 100, 700]),
    st.booleans(),
    st.sampled_from([0, 0, 600]),
)
def test_everything_once(
    case: tuple[list, list], group: int, window: int, shared: bool, slack: int
) -> None:
    tables = make_tables(*case, BLOCK)
    plan = plan_for(tables, group, window, shared, slack)
    found = covered(plan)
    token = 0
    slots: set[int] = set()
    for request, queries in enumerate(tables.query_lens):
        length = tables.seq_lens[request]
        for i in range(queries):
            end = length - queries + i + 1
            assert int(plan.token_end[token]) == end
            begin = max(end - window, 0) if window > 0 else 0
            first = int(plan.token_slot[token])
            own = range(first, first + int(plan.token_parts[token]))
            assert not slots & set(own)
            slots |= set(own)
            for split in range(begin // SPLIT_TOKENS, -(-end // SPLIT_TOKENS)):
                reader, slot = found[token, split]
                assert slot in own
                blocks = slice(split * SPLIT_TOKENS // BLOCK, (split + 1) * 4)
                seen = -(-end // BLOCK)
                assert torch.equal(
                    tables.block_table[reader, blocks][: seen - blocks.start],
                    tables.block_table[request, blocks][: seen - blocks.start],
                )
            token += 1
    assert len(slots) <= plan.num_slots
    if slack == 0 and window < 0:
        assert plan.num_slots == max(len(slots), 1)


def test_a_shared_split_is_one_item() -> None:
    tables = make_tables([Node(None, 8)], [Reader(0, 5, 1)] * 6, BLOCK)
    plan = plan_for(tables, 4, -1, True)
    small, large, chained = plan.lists
    assert (small.rows, large.rows) == (small_rows(4), LARGE_ROWS)
    # Two splits of 24 rows at once, and each reader's own tail.
    assert [item[2:5] for item in items_of(plan, 1)] == [[6, 0, 1], [6, 1, 2]]
    assert int(small.count) == 6
    assert chained.items.shape[0] == 0


def test_nested_prefixes_are_shared_at_both_levels() -> None:
    nodes = [Node(None, 4), Node(0, 4), Node(0, 4)]
    readers = [Reader(1, 9, 1), Reader(2, 9, 1), Reader(1, 9, 1), Reader(2, 9, 1)]
    plan = plan_for(make_tables(nodes, readers, BLOCK), 8, -1, True)
    # Four requests read the first split, pairs of them the second.
    assert sorted(item[2:5] for item in items_of(plan, 1)) == [
        [2, 1, 2],
        [2, 1, 2],
        [4, 0, 1],
    ]


def test_copies_of_a_prefix_are_not_taken_for_it() -> None:
    """The last block agrees, one before it does not: its bits may differ."""
    tables = make_tables([Node(None, 4)], [Reader(0, 5, 1)] * 3, BLOCK)
    tables.block_table[1, 2] = tables.num_blocks
    found = covered(plan_for(tables, 1, -1, True))
    assert [found[token, 0][0] for token in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("block_size", [32, 96, 160, 1024])
def test_splits_end_inside_blocks(block_size: int) -> None:
    """Requests that part in the block after a split's end share the split."""
    blocks = -(-2048 // block_size)
    nodes = [Node(None, blocks)]
    readers = [Reader(0, 7, 1), Reader(0, 30, 2)]
    tables = make_tables(nodes, readers, block_size)
    starts = torch.tensor([0, 1, 3]).int()
    lens = torch.tensor(tables.seq_lens).int()
    plan = build_plan(tables.block_table, lens, starts, 4, block_size)
    shared = [item[3] for item in items_of(plan) if item[2] == 3]
    assert shared == [0, 1, 2, 3]


def test_long_chunks_are_chained() -> None:
    table = torch.arange(40, dtype=torch.int32).reshape(1, 40)
    lens, starts = torch.tensor([1100]).int(), torch.tensor([0, 100]).int()
    plan = build_plan(table, lens, starts, 4, BLOCK)
    assert [item[5] for item in items_of(plan)] == [1] * 13
    assert plan.num_slots == 100  # one state for each token, not one for each split


def test_too_many_heads_are_refused() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    lens, starts = torch.tensor([1]).int(), torch.tensor([0, 1]).int()
    with pytest.raises(NotImplementedError, match="40 query heads per KV head"):
        build_plan(table, lens, starts, 40, BLOCK)


@pytest.mark.parametrize("window", [-1, 700])
def test_the_host_never_waits_for_the_device(window: int) -> None:
    """On tensors without values: whatever reads one on the host raises."""
    starts = torch.tensor([0, 1, 2, 60, 61]).int()
    bounds = plan_bounds(torch.full((4,), 2000).int(), starts, 4, window)
    table = torch.empty(4, 20, dtype=torch.int32, device="meta")
    lens, starts = (torch.empty(n, dtype=torch.int32, device="meta") for n in (4, 5))
    plan = build_plan(table, lens, starts, 4, BLOCK, window, bounds=bounds)
    assert {work.items.device.type for work in plan.lists} == {"meta"}
    assert [len(work.items) > 0 for work in plan.lists] == [True] * 3
    for read in (torch.Tensor.item, torch.Tensor.nonzero, torch.Tensor.tolist):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(plan.num_tokens)
    with pytest.raises(ValueError, match="needs bounds from the host"):
        build_plan(table, lens, starts, 4, BLOCK)
