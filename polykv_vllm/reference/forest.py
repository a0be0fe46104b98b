# SPDX-License-Identifier: Apache-2.0
"""The prefix forest in plain Python: the oracle of csrc/forest.cpp."""

from collections import defaultdict
from collections.abc import Sequence

TILE_TOKENS = 128
MAX_ROWS = 64

Segment = tuple[int, int, tuple[int, ...]]
"""First tile, end tile (exclusive), readers in ascending order."""


def shared_segments(
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
    group: int,
    sliding_window: int = -1,
) -> list[Segment]:
    """Return the segments that several requests read, sorted.

    Tile by tile: requests whose queries all see the whole tile, and some of it through
    their windows, are grouped by the blocks that hold it. Requests whose rows fill a
    pass alone are left out; a group is kept if its rows take fewer passes stacked than
    apart; equal groups of neighbouring tiles are one segment.
    """
    segments: list[Segment] = []
    open_segments: dict[tuple[int, ...], int] = {}  # readers -> first tile
    tiles = max(seq_lens, default=0) // TILE_TOKENS
    for tile in range(tiles + 1):
        begin, end = tile * TILE_TOKENS, (tile + 1) * TILE_TOKENS
        groups = defaultdict(list)
        for request, table in enumerate(block_tables):
            first_seen = seq_lens[request] - query_lens[request] + 1
            window_begin = first_seen - sliding_window if sliding_window > 0 else 0
            alone = query_lens[request] * group >= MAX_ROWS
            if not query_lens[request] or alone:
                continue
            if window_begin < end <= first_seen:
                blocks = table[begin // block_size : (end - 1) // block_size + 1]
                groups[tuple(blocks)].append(request)
        kept = set()
        for members in groups.values():
            rows = sum(query_lens[request] * group for request in members)
            if -(-rows // MAX_ROWS) < len(members):
                kept.add(tuple(members))
        for readers in set(open_segments) - kept:
            segments.append((open_segments.pop(readers), tile, readers))
        for readers in kept:
            open_segments.setdefault(readers, tile)
    return sorted(segments)
