# SPDX-License-Identifier: Apache-2.0
"""Gives a request the first copy of a block in place of its own.

vLLM keeps a block although the cache already has one with the same hash. Two requests
can still come to compute the same block where nobody can wait: the last block of
equal prompts that end with it, since the last token is always computed, and a prompt
whose log-probabilities are asked for, which does not read the cache.
"""

from typing import Any


def fold_duplicates(manager: Any, request_id: str, num_tokens: int) -> int:
    """Replace duplicates in a request's table and free them.

    The caller sees to it that both copies are written, that no step in flight uses
    the table, and that the worker learns of the new one.

    Args:
        manager: vLLM's `SingleTypeKVCacheManager` of one KV cache group.
        request_id: The request.
        num_tokens: Blocks that end within so many tokens are looked at.

    Returns:
        The number of blocks replaced.

    """
    pool = manager.block_pool
    table = manager.req_to_blocks.get(request_id, ())
    freed = []
    for index, block in enumerate(table[: num_tokens // manager.block_size]):
        if block.is_null or block.block_hash is None:
            continue
        first = pool.cached_block_hash_to_block.get_one_block(block.block_hash)
        if first is None or first is block:
            continue
        if first.block_hash_num_tokens == block.block_hash_num_tokens:
            pool.touch([first])
            table[index] = first
            freed.append(block)
    pool.free_blocks(reversed(freed))
    return len(freed)
