# SPDX-License-Identifier: Apache-2.0
"""The prefix forest: which requests of a batch read the same blocks.

vLLM's prefix cache lets the block tables of requests with a common prefix name the
same blocks. The forest is found from the tables alone, once per step, and tells the
kernels which tiles to read once for several requests. It never changes a result.
"""

import ctypes as ct
from dataclasses import dataclass

import torch

from polykv_vllm.ops._structs import ForestArgs, SharingStats
from polykv_vllm.ops.cpu import check_index, load_library

TILE_TOKENS = 128
"""Segments begin and end at multiples of this: the tiles of csrc/kernel_table.h."""


@dataclass(frozen=True)
class SharingCounts:
    """What a batch shares. A pair is one (query token, cached token) of a request.

    Attributes:
        shared_pairs: Pairs attended through shared segments.
        own_token_pairs: Pairs with tokens that the request computes in this step.
        no_other_reader_pairs: Pairs whose tile no other request of the batch has.
        no_gain_pairs: Pairs whose tile others have, but each of them fills its
            passes over the cache alone, as long prefills do.
        distinct_prefixes: Segments that no other segment continues.
        max_readers: Requests that read the most popular segment.
        physical_tokens: Tokens of all segments, each counted once.
        logical_tokens: The same, counted once for each reader.

    """

    shared_pairs: int = 0
    own_token_pairs: int = 0
    no_other_reader_pairs: int = 0
    no_gain_pairs: int = 0
    distinct_prefixes: int = 0
    max_readers: int = 0
    physical_tokens: int = 0
    logical_tokens: int = 0


@dataclass(frozen=True)
class PrefixForest:
    """The shared segments of one batch and KV cache group.

    Attributes:
        segments: `[num_segments, 4]` int32: first tile, end tile (exclusive), first
            index into `readers`, number of readers. Those of one request ascend.
        readers: `[num_readers]` int32, numbers of requests.
        counts: What the batch shares, and why not more.

    """

    segments: torch.Tensor
    readers: torch.Tensor
    counts: SharingCounts

    def __len__(self) -> int:
        """Return the number of segments."""
        return self.segments.shape[0]


def build_prefix_forest(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
    group: int,
    sliding_window: int = -1,
) -> PrefixForest:
    """Find the tiles that several requests of a batch have in the same blocks.

    A request reads a tile with others if all its queries see the whole tile. Where
    stacking the rows of its readers would save no pass over the tile, because each
    reader fills passes of 64 rows alone, it is left to them.

    Args:
        block_table: `[num_reqs, max_num_blocks]` int32 on the CPU.
        seq_lens: `[num_reqs]` int32, the query tokens included.
        query_start_loc: `[num_reqs + 1]` int32.
        block_size: Tokens per block.
        group: Query heads per KV head.
        sliding_window: Keys that a query sees, itself included; -1 for all.

    """
    check_index("block_table", block_table, torch.int32, 2)
    check_index("seq_lens", seq_lens, torch.int32, 1)
    check_index("query_start_loc", query_start_loc, torch.int32, 1)
    num_reqs, width = seq_lens.shape[0], block_table.shape[1]
    if query_start_loc.shape[0] != num_reqs + 1 or block_table.shape[0] < num_reqs:
        raise ValueError(
            f"{num_reqs} requests with {query_start_loc.shape[0]} query offsets and "
            f"{block_table.shape[0]} block table rows"
        )
    # Of padding nothing is read, so its length may be anything.
    has_queries = query_start_loc.diff() > 0
    longest = int((seq_lens * has_queries).max()) if num_reqs else 0
    if longest > width * block_size:
        raise ValueError(f"{longest} tokens do not fit {width} blocks of {block_size}")
    tiles = longest // TILE_TOKENS
    # Every tile begins at most one segment for every two requests.
    segments = torch.empty(max(1, num_reqs * tiles // 2), 4, dtype=torch.int32)
    readers = torch.empty(max(1, num_reqs * tiles), dtype=torch.int32)
    stats = SharingStats()
    args = ForestArgs(
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        segments.data_ptr(),
        readers.data_ptr(),
        ct.addressof(stats),
        block_table.stride(0),
        segments.shape[0],
        readers.shape[0],
        width,
        num_reqs,
        block_size,
        group,
        sliding_window,
    )
    count = load_library().polykv_build_forest(ct.byref(args))
    assert count >= 0, "a forest has fewer readers than requests x tiles"
    used = int(segments[count - 1, 2:].sum()) if count else 0
    counts = SharingCounts(*(getattr(stats, field[0]) for field in stats._fields_))
    return PrefixForest(segments[:count], readers[:used], counts)
