# SPDX-License-Identifier: Apache-2.0
"""Paths of the table that random sequences seldom take, one by one."""

import pytest

from polykv_vllm.windows.sizes import WindowSizes
from polykv_vllm.windows.table import RawTokens, Row, WindowTable

BLOCK_TOKENS = 32  # a granule of the cache is a block


def table(sink_tokens: int, recent_tokens: int) -> WindowTable:
    sizes = WindowSizes(sink_tokens, recent_tokens)
    return WindowTable(8, sizes, BLOCK_TOKENS, null_granules=1)


def step(
    windows: WindowTable, name: str, context: int, length: int, blocks: list[int]
) -> RawTokens:
    """Compute tokens `context` to `length` of one request; return what it read."""
    return windows.plan([Row(name, context, length, blocks)]).reads[0]


def test_tokens_before_the_first_of_a_page_are_not_read() -> None:
    windows = table(0, 64)
    step(windows, "a", 0, 40, [1, 2])
    windows.end(["a"])
    windows.forget([1, 2])  # it comes back without what it had
    read = step(windows, "a", 40, 48, [1, 2])
    assert (read.recent_begin, read.recent_pages) == (40, [])
    read = step(windows, "a", 48, 49, [1, 2])
    assert read.recent_begin == 40
    assert len(read.recent_pages) == 1
    assert windows.pages.valid_from(read.recent_pages[0]) == 8
    # Of the pairs of this one row: tokens 0 to 39 are in its window and are not there.
    assert read.missing_pairs == 40


def test_the_null_block_never_has_a_page() -> None:
    """Layers with sliding windows give blocks back: their tables then name block 0."""
    windows = table(32, 32)
    step(windows, "a", 0, 40, [1, 2])
    assert step(windows, "a", 40, 41, [1, 2]).sink_tokens == 32
    assert step(windows, "a", 41, 42, [0, 2]).sink_tokens == 0
    other = step(windows, "b", 32, 33, [0, 3])
    assert (other.sink_tokens, other.sink_pages) == (0, [])
    assert other.recent_pages == []


@pytest.mark.parametrize("sink_tokens", [0, 32])
def test_a_page_follows_when_its_block_is_exchanged(sink_tokens: int) -> None:
    """One physical copy: a request gets another block with the same tokens."""
    windows = table(sink_tokens, 64)
    step(windows, "a", 0, 64, [1, 2])
    before = step(windows, "a", 64, 65, [1, 2, 3])
    after = step(windows, "a", 65, 66, [6, 7, 3])
    assert before.missing_pairs == after.missing_pairs == 0
    assert after.recent_pages[:2] == before.recent_pages
    assert after.sink_pages == before.sink_pages
    # The blocks that it left have none: they may soon hold other tokens.
    stranger = step(windows, "b", 64, 65, [1, 2, 4])
    assert stranger.recent_pages == []
