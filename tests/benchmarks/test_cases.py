# SPDX-License-Identifier: Apache-2.0
"""Shapes and batches of the kernel benchmarks."""

import pytest
import torch

from benchmarks._cases import BLOCK_SIZE, Case, Shape, make_batch


def test_shape_round_trip() -> None:
    assert str(Shape.parse("32/8/128")) == "32/8/128"


@pytest.mark.parametrize("text", ["9/3", "9/0/64", "9/x/64", "9/2/64", "", "-9/3/64"])
def test_bad_shape_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="shape"):
        Shape.parse(text)


def test_agents_share_all_blocks_but_the_last() -> None:
    case = Case(Shape(4, 2, 64), 3 * BLOCK_SIZE - 5, query_len=2, agents=3)
    batch = make_batch(case)
    assert batch.block_table.shape == (3, 3)
    assert (batch.block_table[:, :-1] == batch.block_table[0, :-1]).all()
    used = torch.cat([batch.block_table[0, :-1], batch.block_table[:, -1]])
    assert sorted(used.tolist()) == list(range(batch.num_blocks))
    assert batch.query.shape == (6, 4, 64)
    assert batch.query_start_loc.tolist() == [0, 2, 4, 6]
