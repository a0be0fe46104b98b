# SPDX-License-Identifier: Apache-2.0
"""Pins on vLLM's own block pool."""

from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from polykv_vllm.pool.pins import Limits, PinError, PrefixPool

SIZE = 32
USABLE = 40
RESERVE = 12


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blocks() -> BlockPool:
    return BlockPool(USABLE + 1, enable_caching=True, hash_block_size=SIZE)


@pytest.fixture
def pool(blocks: BlockPool, clock: Clock) -> PrefixPool:
    return PrefixPool(blocks, Limits(USABLE, RESERVE, 0.5, SIZE), clock)


def hashes(first: int, count: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in range(first, first + count)]


def compute(blocks: BlockPool, names: list[bytes]) -> None:
    """Cache blocks as a request does that has come and gone."""
    taken = blocks.get_new_blocks(len(names))
    for block, name in zip(taken, names, strict=True):
        key = make_block_hash_with_group_id(name, 0)  # type: ignore[arg-type]
        blocks._insert_block_hash(key, block, num_tokens=SIZE)
    blocks.free_blocks(reversed(taken))


def named(pool: PrefixPool, name: str, names: list[bytes], **options: Any) -> Any:
    tokens = range(len(names) * SIZE)
    given = {"salt": None, "ttl_s": None} | options
    return pool.define(given["salt"], name, tokens, names, given["ttl_s"])


def survives(blocks: BlockPool, names: list[bytes]) -> int:
    """Run ten caches full of other requests through; count what is still there."""
    for burst in range(10):
        free = blocks.get_num_free_blocks()
        compute(blocks, hashes(1000 * (burst + 1), free))
    return sum(blocks.get_cached_block(n, [0]) is not None for n in names)  # type: ignore[arg-type]


def test_a_burst_does_not_touch_what_is_pinned(
    pool: PrefixPool, blocks: BlockPool
) -> None:
    names = hashes(0, 10)
    compute(blocks, names)
    prefix = named(pool, "a", names)
    pool.pin(prefix)
    assert prefix.state == "pinned"
    assert survives(blocks, names) == 10
    pool.remove(None, "a")
    assert survives(blocks, names) == 0
    assert blocks.get_num_free_blocks() == USABLE


def test_what_is_not_there_is_not_pinned_and_said(
    pool: PrefixPool, blocks: BlockPool
) -> None:
    names = hashes(0, 10)
    compute(blocks, names[:4])
    prefix = named(pool, "a", names)
    pool.pin(prefix)
    assert (prefix.state, len(prefix.held)) == ("partial", 4)
    compute(blocks, names[4:])
    pool.pin(prefix)
    assert prefix.state == "pinned"
    assert pool.num_pinned == 10


@pytest.mark.parametrize(
    ("share", "reserve", "cap"), [(0.5, 12, 20), (1.0, 12, 28), (0.5, 40, 0)]
)
def test_the_cap_leaves_room_for_the_longest_request(
    share: float, reserve: int, cap: int
) -> None:
    assert Limits(USABLE, reserve, share, SIZE).cap == cap


def test_beyond_the_cap_is_refused_with_the_numbers(
    pool: PrefixPool, blocks: BlockPool
) -> None:
    first, second = hashes(0, 15), hashes(100, 6)
    compute(blocks, [*first, *second])
    pool.pin(named(pool, "a", first))
    for check in (
        lambda: pool.check_room(None, second),
        lambda: pool.pin(named(pool, "b", second)),
    ):
        with pytest.raises(PinError) as error:
            check()
        assert error.value.status == 409
        for part in ("6 blocks (192 tokens)", "15 of at most 20", "50%", "12 for one"):
            assert part in str(error.value)
    assert pool.num_pinned == 15
    pool.check_room(None, hashes(100, 5))


def test_blocks_of_two_prefixes_count_once(pool: PrefixPool, blocks: BlockPool) -> None:
    names = hashes(0, 16)
    compute(blocks, names)
    long, short = named(pool, "long", names), named(pool, "short", names[:8])
    pool.pin(long)
    pool.pin(short)
    pool.check_room(None, names)
    assert pool.num_pinned == 16
    pool.unpin(long)
    assert pool.num_pinned == 8
    assert survives(blocks, names) == 8


def test_a_hit_renews_the_time_to_live(
    pool: PrefixPool, blocks: BlockPool, clock: Clock
) -> None:
    names = hashes(0, 4)
    compute(blocks, names)
    prefix = named(pool, "a", names, ttl_s=10.0)
    pool.pin(prefix)
    clock.now = 9.0
    pool.on_request([*names, b"more"])
    pool.on_request(names[:3])  # shorter: no hit
    clock.now = 18.0
    pool.expire()
    assert (prefix.state, prefix.hits) == ("pinned", 1)
    clock.now = 19.0
    pool.expire()
    assert prefix.state == "unpinned"
    assert "time" in prefix.lost
    assert blocks.get_num_free_blocks() == USABLE


def test_a_reset_needs_every_pin_gone(pool: PrefixPool, blocks: BlockPool) -> None:
    names = hashes(0, 4)
    compute(blocks, names)
    prefix = named(pool, "a", names)
    pool.pin(prefix)
    assert not blocks.reset_prefix_cache()
    assert pool.unpin_all("reset") == 1
    assert blocks.reset_prefix_cache()
    assert (prefix.state, prefix.lost) == ("unpinned", "reset")


def test_names_belong_to_a_salt(pool: PrefixPool) -> None:
    named(pool, "a", hashes(0, 2), salt="x")
    named(pool, "a", hashes(10, 2), salt="y")
    assert pool.get("x", "a").hashes != pool.get("y", "a").hashes
    with pytest.raises(PinError, match="no prefix 'a'"):
        pool.get(None, "a")


def test_another_content_under_a_name_takes_its_place(
    pool: PrefixPool, blocks: BlockPool
) -> None:
    compute(blocks, hashes(0, 4))
    first = named(pool, "a", hashes(0, 4))
    pool.pin(first)
    assert named(pool, "a", hashes(0, 4)) is first
    second = named(pool, "a", hashes(10, 3))
    assert second is not first
    assert pool.num_pinned == 0


def test_a_salt_is_not_told_what_others_pin(
    pool: PrefixPool, blocks: BlockPool
) -> None:
    """CASE 29: neither their names nor how much they hold."""
    first, second = hashes(0, 15), hashes(100, 3)
    compute(blocks, [*first, *second])
    pool.pin(named(pool, "a", first))
    pool.pin(named(pool, "b", second, salt="x"))
    with pytest.raises(PinError) as error:
        pool.check_room("x", hashes(200, 4))
    assert "3 are pinned by this salt" in str(error.value)
    assert not {"15", "18"} & set(str(error.value).split())
    assert (pool.num_pinned_by("x"), pool.num_pinned_by(None)) == (3, 15)


def test_names_are_limited_for_each_salt(
    pool: PrefixPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polykv_vllm.pool.pins.MAX_NAMES", 2)
    named(pool, "a", hashes(0, 1), salt="x")
    named(pool, "b", hashes(1, 1), salt="x")
    with pytest.raises(PinError, match="2 prefixes already") as error:
        named(pool, "c", hashes(2, 1), salt="x")
    assert error.value.status == 409
    named(pool, "b", hashes(5, 1), salt="x")  # replaced, not one more
    named(pool, "c", hashes(2, 1), salt="y")
