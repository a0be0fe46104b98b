# SPDX-License-Identifier: Apache-2.0
"""The prefix forest: which requests of a batch read the same blocks.

vLLM's prefix cache lets the block tables of requests with a common prefix name the
same blocks. The forest is found from the tables alone, once per step, and tells the
kernels which tiles to read once for several requests. It never changes a result.
"""

import ctypes as ct

import torch

from polykv_vllm.ops._structs import ForestArgs, SharingStats
from polykv_vllm.ops.batch import check_batch
from polykv_vllm.ops.cpu import load_library
from polykv_vllm.ops.segments import PrefixForest, SharingCounts

TILE_TOKENS = 128
"""Segments begin and end at multiples of this: the tiles of csrc/kernel_table.h."""


def build_prefix_forest(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
    group: int,
    sliding_window: int = -1,
) -> PrefixForest:
    """Find the tiles that several requests of a batch have in the same blocks.

    A request reads a tile with others if all its queries see the whole tile and its
    rows do not fill a pass of 64 alone, and if stacking the rows of all such readers
    saves a pass.

    Args:
        block_table: `[num_reqs, max_num_blocks]` int32 on the CPU.
        seq_lens: `[num_reqs]` int32, the query tokens included.
        query_start_loc: `[num_reqs + 1]` int32.
        block_size: Tokens per block.
        group: Query heads per KV head.
        sliding_window: Keys that a query sees, itself included; -1 for all.

    """
    check_batch(block_table, seq_lens, query_start_loc)
    num_reqs, width = seq_lens.shape[0], block_table.shape[1]
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
