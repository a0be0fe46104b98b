# SPDX-License-Identifier: Apache-2.0
"""Work lists cover every (query token, split) of a batch exactly once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm import ops
from polykv_vllm.kernels.triton.config import LARGE_ROWS, small_rows
from polykv_vllm.kernels.triton.plan import SPLIT_TOKENS, AttentionPlan, build_plan
from tests.forest_cases import Tables, forests, make_tables

BLOCK = 128


def plan_for(
    tables: Tables, group: int, window: int, shared: bool
) -> tuple[AttentionPlan, ops.PrefixForest | None]:
    """Return the plan of a batch, with or without its forest."""
    starts = torch.tensor([0, *tables.query_lens]).cumsum(0).int()
    lens = torch.tensor(tables.seq_lens, dtype=torch.int32)
    forest = None
    if shared:
        forest = ops.build_prefix_forest(
            tables.block_table, lens, starts, BLOCK, group, window
        )
    parts = (None, None) if forest is None else (forest.segments, forest.readers)
    plan = build_plan(tables.block_table, lens, starts, group, window, *parts)
    return plan, forest


def covered(plan: AttentionPlan) -> dict[tuple[int, int], tuple[int, int]]:
    """Return {(token, split): (request whose table is used, slot)}."""
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for work in plan.lists:
        assert work.items.shape[0] == int(work.count)
        for request, first, count, begin, end, chained in work.items.tolist():
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
)
def test_everything_once(
    case: tuple[list, list], group: int, window: int, shared: bool
) -> None:
    tables = make_tables(*case, BLOCK)
    plan, _ = plan_for(tables, group, window, shared)
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
    assert plan.num_slots == max(len(slots), 1)


def test_a_shared_split_is_one_item() -> None:
    from tests.forest_cases import Node, Reader

    tables = make_tables([Node(None, 8)], [Reader(0, 5, 1)] * 6, BLOCK)
    plan, forest = plan_for(tables, 4, -1, True)
    assert forest is not None and len(forest) == 1
    small, large = plan.lists
    assert (small.rows, large.rows) == (small_rows(4), LARGE_ROWS)
    # Two splits of 24 rows at once, and each reader's own tail.
    assert [item[2:5] for item in large.items.tolist()] == [[6, 0, 1], [6, 1, 2]]
    assert small.items.shape[0] == 6


def test_long_chunks_are_chained() -> None:
    table = torch.arange(40, dtype=torch.int32).reshape(1, 40)
    lens, starts = torch.tensor([1100]).int(), torch.tensor([0, 100]).int()
    plan = build_plan(table, lens, starts, 4)
    items = [item for work in plan.lists for item in work.items.tolist()]
    assert all(item[5] == 1 for item in items)
    assert plan.num_slots == 100  # one state for each token, not one for each split


def test_too_many_heads_are_refused() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="40 query heads per KV head"):
        build_plan(table, torch.tensor([1]).int(), torch.tensor([0, 1]).int(), 40)
