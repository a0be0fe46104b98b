# SPDX-License-Identifier: Apache-2.0
"""Shared segments with windows: what a reader sees raw is masked, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm.formats import FormatSpec
from tests.csrc.test_sharing import mixed_batch
from tests.forest_cases import Node, Reader, forests, make_forest_batch, make_tables
from tests.kernel_cases import CPP_ISAS, FASTEST, FORMAT_LIST, worst_ratio
from tests.window_cases import random_copies, with_windows

ISAS = pytest.mark.parametrize("isa", CPP_ISAS)


@ISAS
@pytest.mark.parametrize("sliding", [-1, 300])
@pytest.mark.parametrize(
    "windows", [(4, 32), (64, 256), (0, 700), (200, 0), (9000, 0)], ids=str
)
def test_mixed_batch(isa: str, sliding: int, windows: tuple[int, int]) -> None:
    batch = mixed_batch(FORMAT_LIST[0], sliding, kv_heads=2)
    forest = batch.forest()
    assert len(forest) > 2
    windowed = with_windows(batch, random_copies(batch), *windows)
    alone = windowed.run(isa)
    for threads in (1, 2):
        assert torch.equal(windowed.run(isa, threads, forest), alone)


@ISAS
@settings(max_examples=12)
@given(
    data=st.data(),
    fmt=st.sampled_from(FORMAT_LIST),
    block_size=st.sampled_from([32, 128]),
    group=st.sampled_from([1, 3, 7]),
    sliding=st.sampled_from([-1, -1, 100, 513]),
    recent=st.integers(0, 700),
    threads=st.sampled_from([1, 2, 3]),
)
def test_random_forests(
    isa: str,
    data: Any,
    fmt: FormatSpec,
    block_size: int,
    group: int,
    sliding: int,
    recent: int,
    threads: int,
) -> None:
    """Every request with sinks and lost copies of its own."""
    nodes, readers = data.draw(forests(block_size))
    tables = make_tables(nodes, readers, block_size)
    batch = make_forest_batch(tables, fmt, block_size, group=group, window=sliding)
    sinks = [data.draw(st.integers(0, 300)) for _ in readers]
    begins = [
        data.draw(st.sampled_from([0, (n - q) // 2, n - q]))
        for q, n in batch.requests()
    ]
    windowed = with_windows(batch, random_copies(batch), sinks, recent, begins)
    expected = windowed.run(isa)
    assert torch.equal(windowed.run(isa, threads, batch.forest()), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("recent", [0, 50, 300, 1000, 1600])
def test_window_within_a_long_prefix(threads: int, recent: int) -> None:
    """The readers' cached tokens end tiles and splits before their shared segment."""
    readers = [Reader(0, own, 1) for own in (1, 30, 9)]
    tables = make_tables([Node(None, 13)], readers, 128)
    batch = make_forest_batch(tables, FORMAT_LIST[1], 128, kv_heads=1)
    windowed = with_windows(batch, random_copies(batch), [4, 0, 200], recent)
    forest = batch.forest()
    assert forest.segments.tolist() == [[0, 13, 0, 3]]
    shared = windowed.run(FASTEST, threads, forest)
    assert torch.equal(shared, windowed.run(FASTEST))
    assert worst_ratio(windowed, shared) <= 1
