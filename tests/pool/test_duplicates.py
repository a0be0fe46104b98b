# SPDX-License-Identifier: Apache-2.0
"""Folding in vLLM's own block pool."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="folding is about vLLM's block pool")

from polykv_vllm.pool.duplicates import fold_duplicates

SIZE = 16


@pytest.fixture
def pool() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_gpu_blocks=12, enable_caching=True, hash_block_size=SIZE)


def held_by(pool: Any, hashes: list[bytes]) -> list[Any]:
    """New blocks in the cache, one for each hash."""
    blocks = pool.get_new_blocks(len(hashes))
    for index, (block, key) in enumerate(zip(blocks, hashes, strict=True)):
        pool._insert_block_hash(key, block, num_tokens=(index + 1) * SIZE)
    return list(blocks)


def fold(pool: Any, table: list[Any], num_tokens: int) -> int:
    manager = SimpleNamespace(
        block_pool=pool, block_size=SIZE, req_to_blocks={"request": table}
    )
    return fold_duplicates(manager, "request", num_tokens)


def test_a_request_gets_the_first_copies(pool: Any) -> None:
    first = held_by(pool, [b"a", b"b", b"c"])
    table = held_by(pool, [b"a", b"b", b"x"])
    mine = list(table)
    free = pool.get_num_free_blocks()
    assert fold(pool, table, 3 * SIZE) == 2
    assert table == [first[0], first[1], mine[2]]
    assert [b.ref_cnt for b in first] == [2, 2, 1]
    assert pool.get_num_free_blocks() == free + 2
    assert fold(pool, table, 3 * SIZE) == 0
    pool.free_blocks(reversed(table))
    pool.free_blocks(reversed(first))
    assert pool.get_num_free_blocks() == 11


def test_only_blocks_of_the_prompt_are_folded(pool: Any) -> None:
    held_by(pool, [b"a", b"b"])
    table = held_by(pool, [b"a", b"b"])
    mine = list(table)
    assert fold(pool, table, 2 * SIZE - 1) == 1
    assert table[1] is mine[1]


def test_blocks_without_a_hash_stay(pool: Any) -> None:
    table = [pool.null_block, *pool.get_new_blocks(1)]
    before = list(table)
    assert fold(pool, table, 2 * SIZE) == 0
    assert table == before


def test_a_first_copy_that_nobody_holds_is_revived(pool: Any) -> None:
    first = held_by(pool, [b"a"])
    table = held_by(pool, [b"a"])
    pool.free_blocks(first)
    free = pool.get_num_free_blocks()
    assert fold(pool, table, SIZE) == 1
    assert table == first
    assert first[0].ref_cnt == 1
    assert pool.get_num_free_blocks() == free


def test_an_unknown_request_has_nothing_to_fold(pool: Any) -> None:
    manager = SimpleNamespace(block_pool=pool, block_size=SIZE, req_to_blocks={})
    assert fold_duplicates(manager, "gone", SIZE) == 0
    assert manager.req_to_blocks == {}
