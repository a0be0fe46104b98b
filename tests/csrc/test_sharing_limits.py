# SPDX-License-Identifier: Apache-2.0
"""Shared segments at the edges: sizes, poison, threads of the caller, memory."""

import gc
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polykv_vllm import ops
from tests.forest_cases import Node, Reader, make_forest_batch, make_tables
from tests.kernel_cases import CPP_ISAS, FASTEST, FORMAT_LIST, Batch

FMT = FORMAT_LIST[0]
POISON = pytest.mark.parametrize("poison", [float("inf"), float("nan")])

# A group with a nested prompt, another group, a loner.
NODES = [Node(None, 40), Node(0, 10), Node(None, 24)]
READERS = [
    Reader(0, 30, 1),
    Reader(1, 64, 1),
    Reader(2, 10, 2),
    Reader(1, 9, 3),
    Reader(None, 300, 1),
    Reader(2, 70, 1),
]


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, NaN included; a NaN must be in both."""
    return bool(torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True))


def overwrite(batch: Batch, blocks: torch.Tensor, value: float, part: str) -> None:
    """Store one bad token at the start of each of some blocks."""
    heads, head_dim = batch.kv_cache.shape[1], batch.query.shape[2]
    rows = torch.zeros(2, blocks.numel(), heads, head_dim)
    rows[0 if part == "key" else 1, ..., 5] = value
    slots = blocks.long() * batch.kv_cache.shape[2]
    ops.reshape_and_cache(*rows, batch.kv_cache, slots, FMT, isa=FASTEST)


@pytest.mark.parametrize("isa", CPP_ISAS)
@pytest.mark.parametrize("part", ["key", "value"])
@POISON
@pytest.mark.parametrize(
    ("request_", "block", "victims"),
    [
        (1, 3, {0, 1, 3}),  # in the prompt that the nested one continues
        (1, 45, {1, 3}),  # in the nested part
        (1, 51, {1}),  # its own
        (2, 0, {2, 5}),
        (4, 0, {4}),
    ],
)
def test_poison_stays_with_its_readers(
    isa: str, part: str, poison: float, request_: int, block: int, victims: set[int]
) -> None:
    """Case 5: also where rows of several requests are computed together."""
    batch = make_forest_batch(make_tables(NODES, READERS, 32), FMT, 32)
    forest = batch.forest()
    clean = batch.run(isa)
    overwrite(batch, batch.block_table[request_, block : block + 1], poison, part)
    got = batch.run(isa, 2, forest)
    assert same_bits(got, batch.run(isa))
    for request in range(len(READERS)):
        rows = batch.rows(request)
        if request in victims:
            assert not got[rows].isfinite().all(dim=-1).any()
        else:
            assert torch.equal(got[rows], clean[rows])


def test_poison_outside_some_readers_windows() -> None:
    """A tile is read for those who see a part of it, by rows that see another one."""
    readers = [Reader(0, 10, 1), Reader(0, 40, 1), Reader(0, 60, 1)]
    tables = make_tables([Node(None, 16)], readers, 32)
    batch = make_forest_batch(tables, FMT, 32, window=200)
    clean = batch.run(FASTEST)
    # Windows begin at 322, 352 and 372, in one tile; two of them see token 352.
    overwrite(batch, batch.block_table[0, 11:12], torch.nan, "key")
    got = batch.run(FASTEST, forest=batch.forest())
    assert batch.forest().counts.max_readers == 3
    assert got[:2].isnan().all()
    assert torch.equal(got[2], clean[2])


@pytest.mark.parametrize("windows", [(-1, 200), (200, -1), (200, 513), (513, 200)])
@pytest.mark.parametrize("order", [1, -1])
def test_the_forest_of_another_window(windows: tuple[int, int], order: int) -> None:
    """Layers with and without windows may be in one KV cache group, and share it."""
    readers = [Reader(0, 10 + 70 * i, 1 + 9 * (i % 2)) for i in range(6)]
    readers += [Reader(1, 5, 1), Reader(1, 300, 2), Reader(None, 64, 1)]
    tables = make_tables([Node(None, 20), Node(0, 9)], readers[::order], 32)
    batch = make_forest_batch(tables, FMT, 32, window=windows[0])
    forest = replace(batch, window=windows[1]).forest()
    assert forest
    assert torch.equal(batch.run(FASTEST, 2, forest), batch.run(FASTEST))


@pytest.mark.parametrize("block_size", [32, 256])
@pytest.mark.parametrize("entry", ["first", "last"])
def test_one_block_that_is_not_shared_is_found(block_size: int, entry: str) -> None:
    """At either end of a segment that a wrong forest names."""
    tables = make_tables(
        [Node(None, 1024 // block_size)], [Reader(0, 9, 1)] * 2, block_size
    )
    batch = make_forest_batch(tables, FMT, block_size)
    blocks = range(512 // block_size, 768 // block_size)
    index = blocks[0] if entry == "first" else blocks[-1]
    batch.block_table[1, index] = batch.block_table[1, 0]
    wrong = ops.PrefixForest(
        torch.tensor([[4, 6, 0, 2]], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        ops.SharingCounts(),
    )
    with pytest.raises(ValueError, match="0 and 1 do not share the blocks"):
        batch.run(FASTEST, forest=wrong)


@pytest.mark.parametrize("block_size", [32, 64, 96, 160, 256])
@pytest.mark.parametrize("window", [-1, 200])
def test_block_sizes_that_no_tile_fits(block_size: int, window: int) -> None:
    """Segments end with tiles, wherever blocks do; also a block that spans tiles."""
    nodes = [Node(None, 1280 // block_size), Node(0, 640 // block_size)]
    readers = [Reader(1, 20, 1), Reader(0, 3, 2), Reader(1, 0, 1), Reader(0, 200, 9)]
    batch = make_forest_batch(
        make_tables(nodes, readers, block_size), FMT, block_size, window=window
    )
    forest = batch.forest()
    assert forest
    assert torch.equal(batch.run(FASTEST, 2, forest), batch.run(FASTEST))


@pytest.mark.parametrize("tokens", [127, 128, 129, 511, 512, 513, 1024])
def test_sequences_that_end_with_a_tile_or_a_split(tokens: int) -> None:
    """Two prompts that are the same to the last token, and one token more."""
    blocks, own = divmod(tokens, 32)
    for extra, queries in ((own, 1), (own + 1, 1), (own + 1, 2)):
        readers = [Reader(0, extra, queries)] * 3
        tables = make_tables([Node(None, blocks)], readers, 32)
        batch = make_forest_batch(tables, FMT, 32)
        assert torch.equal(batch.run(FASTEST, 3, batch.forest()), batch.run(FASTEST))


def test_one_request() -> None:
    batch = make_forest_batch(make_tables(NODES, READERS[:1], 32), FMT, 32)
    assert not batch.forest()
    assert torch.equal(batch.run(FASTEST, forest=batch.forest()), batch.run(FASTEST))


def test_512_requests() -> None:
    """Three hundred of one prompt, pairs, padding between them."""
    nodes = [Node(None, 12), Node(0, 4)] + [Node(None, 5)] * 50
    readers = [Reader(i % 2, i % 40, min(1, i % 5)) for i in range(300)]
    readers += [Reader(2 + i // 2, 1 + i % 30, 1) for i in range(100)]
    readers += [Reader(None, 1 + i, 1) for i in range(112)]
    readers = [readers[37 * i % 512] for i in range(512)]
    batch = make_forest_batch(make_tables(nodes, readers, 32), FMT, 32)
    forest = batch.forest()
    assert forest.counts.max_readers == 240  # a fifth of 300 is padding
    assert forest.counts.distinct_prefixes == 51
    assert torch.equal(batch.run(FASTEST, 2, forest), batch.run(FASTEST))


def test_a_wide_table_with_garbage_behind_the_blocks() -> None:
    """What vLLM hands over: rows as wide as the longest request it would allow."""
    batch = make_forest_batch(make_tables(NODES, READERS, 32), FMT, 32)
    expected, forest = batch.run(FASTEST), batch.forest()
    wide = torch.randint(-(2**31), 2**31 - 1, (len(READERS), 70_000)).int()
    for request, (_, length) in enumerate(batch.requests()):
        used = -(-length // 32)
        wide[request, :used] = batch.block_table[request, :used]
    other = replace(batch, block_table=wide)
    assert torch.equal(other.forest().segments, forest.segments)
    assert other.forest().counts == forest.counts
    assert torch.equal(other.run(FASTEST, forest=other.forest()), expected)


def test_a_table_that_is_too_narrow_is_refused() -> None:
    batch = make_forest_batch(make_tables(NODES, READERS, 32), FMT, 32)
    narrow = replace(batch, block_table=batch.block_table[:, :50])
    with pytest.raises(ValueError, match="1664 tokens do not fit 50 blocks of 32"):
        narrow.forest()


def test_more_splits_than_wait_at_once() -> None:
    """csrc/cpu/schedule.cpp runs at most 512 splits before it folds their results."""
    # 31 passes of 18 splits; 32 passes would be enough for threads to take whole ones.
    tables = make_tables([Node(None, 70)], [Reader(0, 9, 1)] * 31, 128)
    batch = make_forest_batch(tables, FMT, 128)
    expected = batch.run(FASTEST)
    assert torch.equal(batch.run(FASTEST, 8), expected)
    assert torch.equal(batch.run(FASTEST, 8, batch.forest()), expected)


def test_calls_from_several_threads() -> None:
    """Each has its own scratch; ctypes lets go of the interpreter's lock."""
    shapes = [(64, 32), (128, 64), (64, 64), (256, 32)]
    batches = [
        make_forest_batch(
            make_tables(NODES, READERS, size), FMT, size, head_dim=dim, seed=dim
        )
        for dim, size in shapes
    ]
    expected = [batch.run(FASTEST) for batch in batches]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(40):
            batch = batches[i]
            if not torch.equal(batch.run(FASTEST, 2, batch.forest()), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def resident_kib() -> int:
    gc.collect()
    match = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1])


def test_repeated_calls_take_no_memory() -> None:
    batch = make_forest_batch(make_tables(NODES[:1], READERS[:1] * 3, 32), FMT, 32)

    def call(times: int) -> None:
        for _ in range(times):
            batch.run(FASTEST, forest=batch.forest())

    call(200)
    before_kib = resident_kib()
    call(3000)
    # 100 bytes a call would be a leak of 300 KiB.
    assert resident_kib() - before_kib < 250


def test_threads_that_end_take_their_scratch_along() -> None:
    batch = make_forest_batch(make_tables(NODES[:1], READERS[:1] * 2, 32), FMT, 32)

    def start(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=batch.run, args=(FASTEST,))
            thread.start()
            thread.join()

    start(50)
    before_kib = resident_kib()
    start(300)
    # The scratch of one thread takes about 50 KiB.
    assert resident_kib() - before_kib < 2000
