# SPDX-License-Identifier: Apache-2.0
"""Files of blocks: whole, found again, let go, and never believed when damaged."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polykv_vllm.pool.disk.blockfile import HEADER_BYTES
from polykv_vllm.pool.disk.directory import (
    MARKER,
    PoolDirectoryError,
    block_path,
    prepare_directory,
)
from polykv_vllm.pool.disk.identity import RankIdentity
from polykv_vllm.pool.disk.store import BlockStore
from polykv_vllm.pool.disk.writer import BackgroundWriter

PAYLOAD = 10_000
ON_DISK = 12_288  # whole pages
IDENTITY = RankIdentity({"weights": "a", "place": {"rank": 0}})


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return bytes([number % 256]) * PAYLOAD


def open_store(
    path: Path, max_bytes: int = 100 * ON_DISK, identity: RankIdentity = IDENTITY
) -> BlockStore:
    prepare_directory(path)
    return BlockStore(path, identity, PAYLOAD, max_bytes)


def read(store: BlockStore, number: int) -> bytes | None:
    payload = bytearray(PAYLOAD)
    found = store.read(name(number), memoryview(payload))
    return bytes(payload) if found else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def test_a_block_comes_back_after_a_restart(path: Path) -> None:
    first = open_store(path)
    assert first.write(name(1), [content(1)[:300], content(1)[300:]])
    assert not first.write(name(1), [content(1)])  # there already
    first.close()
    second = open_store(path)
    assert name(1) in second and name(2) not in second
    assert read(second, 1) == content(1)
    assert read(second, 2) is None
    assert second.counters == {"restored": 1, "missing": 1}


def test_files_are_private(path: Path) -> None:
    store = open_store(path)
    store.write(name(1), [content(1)])
    for found in [path, *path.rglob("*")]:
        if found.name != MARKER:
            assert found.stat().st_mode & 0o077 == 0, found


@pytest.mark.parametrize("offset", [0, 9, 20, 60, 100, HEADER_BYTES, -1])
def test_a_flipped_bit_is_a_miss_and_the_file_goes(path: Path, offset: int) -> None:
    store = open_store(path)
    store.write(name(1), [content(1)])
    file = block_path(store.rank, name(1))
    damaged = bytearray(file.read_bytes())
    damaged[offset] ^= 1
    file.write_bytes(damaged)
    assert read(store, 1) is None
    assert store.counters["damaged"] == 1
    assert not file.exists() and name(1) not in store


def test_what_is_not_a_block_is_no_block(path: Path, tmp_path: Path) -> None:
    """Torn, swapped, linked, a directory, a pipe: misses, found at once or later."""
    store = open_store(path)
    for number in range(6):
        store.write(name(number), [content(number)])
    files = [block_path(store.rank, name(number)) for number in range(6)]
    os.truncate(files[0], 5000)
    files[1].write_bytes(files[2].read_bytes())
    (tmp_path / "elsewhere").write_bytes(files[3].read_bytes())
    files[3].unlink()
    files[3].symlink_to(tmp_path / "elsewhere")
    files[4].unlink()
    files[4].mkdir()
    files[5].unlink()
    os.mkfifo(files[5])
    assert [read(store, n) is not None for n in range(6)] == [0, 0, 1, 0, 0, 0]
    store.close()
    again = open_store(path)
    assert [name(n) in again for n in range(6)] == [0, 0, 1, 0, 0, 0]
    assert (tmp_path / "elsewhere").exists()


def test_names_outside_the_scheme_are_left_alone(path: Path) -> None:
    store = open_store(path)
    store.write(name(1), [content(1)])
    shelf = block_path(store.rank, name(1)).parent
    strange = [shelf / "..x", shelf / ("Z" * 64), store.rank / "note", shelf / "a"]
    for file in strange:
        file.write_text("mine")
    unfinished = shelf / ".123-4"
    unfinished.write_text("left by a killed writer")
    store.close()
    assert open_store(path).num_blocks == 1
    assert all(file.exists() for file in strange)
    assert not unfinished.exists()


def test_the_longest_unused_go_first_and_pinned_ones_stay(path: Path) -> None:
    store = open_store(path, 3 * ON_DISK)
    for number in range(3):
        store.write(name(number), [content(number)])
    store.touch([name(0)])
    store.set_pinned([name(1)])
    store.write(name(3), [content(3)])
    store.write(name(4), [content(4)])
    assert [name(n) in store for n in range(5)] == [False, True, False, True, True]
    assert store.num_bytes <= 3 * ON_DISK
    store.set_pinned([name(n) for n in (1, 3, 4)])
    assert not store.write(name(5), [content(5)])
    assert store.counters["no_room"] == 1


def test_the_order_of_use_survives_a_restart_and_a_smaller_limit(path: Path) -> None:
    store = open_store(path)
    for number in range(4):
        store.write(name(number), [content(number)])
        then = time.time() - 1000 + number
        os.utime(block_path(store.rank, name(number)), (then, then))
    store._blocks[name(0)] = -1e9  # noted long ago
    assert read(store, 0) == content(0)
    store.close()
    again = open_store(path, 2 * ON_DISK)
    assert [name(n) in again for n in range(4)] == [True, False, False, True]


def test_clocks_may_jump(path: Path) -> None:
    store = open_store(path)
    store.write(name(1), [content(1)])
    for then in (0, 2**33):
        os.utime(block_path(store.rank, name(1)), (then, then))
        store.close()
        store = open_store(path)
        assert read(store, 1) == content(1)


@pytest.mark.parametrize(
    "change", [{"weights": "b"}, {"layers": ["x"]}, {"place": {"rank": 1}}]
)
def test_another_identity_reads_nothing(
    path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """CASE 23: what differs is a miss, and the log says what differed."""
    first = open_store(path)
    first.write(name(1), [content(1)])
    first.close()
    other = RankIdentity(IDENTITY.fields | change)  # type: ignore[arg-type]
    caplog.set_level("INFO", logger="vllm.polykv")
    second = open_store(path, identity=other)
    assert name(1) not in second
    file = block_path(second.rank, name(1))
    file.parent.mkdir()
    file.write_bytes(block_path(first.rank, name(1)).read_bytes())
    second.close()
    assert read(open_store(path, identity=other), 1) is None  # not even renamed
    if "place" not in change:
        assert f"{next(iter(change))}: here" in caplog.text


def test_former_configurations_make_room_first(path: Path) -> None:
    first = open_store(path)
    for number in range(3):
        first.write(name(number), [content(number)])
    first.close()
    other = RankIdentity(IDENTITY.fields | {"weights": "b"})
    second = open_store(path, 4 * ON_DISK, other)
    for number in range(4):
        second.write(name(number), [content(number)])
    assert second.num_blocks == 4
    assert not list(first.rank.glob("??/*"))


def test_one_writes_and_the_others_read(path: Path) -> None:
    writer, reader = open_store(path), open_store(path)
    assert writer.is_writer and not reader.is_writer
    assert not reader.write(name(1), [content(1)])
    writer.write(name(1), [content(1)])
    assert name(1) in reader and read(reader, 1) == content(1)
    assert not reader.take_over()
    writer.close()
    reader._tried_s = -1e9
    assert reader.take_over()
    assert reader.num_blocks == 1 and reader.write(name(2), [content(2)])


def test_a_lock_dies_with_its_process(path: Path) -> None:
    code = (
        "import os, sys; from tests.pool.disk.test_store import *; "
        "s = open_store(Path(sys.argv[1])); assert s.is_writer; os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)])
    assert open_store(path).is_writer


def test_a_full_disk_is_counted_and_serving_goes_on(path: Path) -> None:
    """CASE 25, with a limit on the size of files, which binds root, too."""
    store = open_store(path)
    writer = BackgroundWriter(store)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAYLOAD // 2, limits[1]))
    try:
        assert writer.wants(name(1))
        writer.submit(name(1), content(1))
        deadline = time.monotonic() + 30
        while not store.counters["failed"] and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.counters["failed"] == 1
    assert store.num_blocks == 0
    assert not [file for file in store.rank.glob("??/*")]  # no half of a file
    assert not writer.wants(name(2))  # it rests
    assert store.counters["dropped"] == 1
    writer._rests_until = 0.0
    assert writer.wants(name(2))
    writer.submit(name(2), content(2))
    writer.close()
    assert read(store, 2) == content(2)


def test_a_writer_that_is_behind_drops(path: Path) -> None:
    store = open_store(path)
    writer = BackgroundWriter(store, max_waiting_bytes=2 * PAYLOAD)
    writer.close()  # nobody writes any more
    for number in range(4):
        if writer.wants(name(number)):
            writer.submit(name(number), content(number))
    assert store.counters["dropped"] == 2


def test_directories_that_are_no_pool(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("")
    with pytest.raises(PoolDirectoryError, match="not empty"):
        prepare_directory(tmp_path)
    pool = tmp_path / "pool"
    prepare_directory(pool)
    (pool / MARKER).write_text("polykv-vllm pool, version 999\n")
    with pytest.raises(PoolDirectoryError, match="999"):
        prepare_directory(pool)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    shared.chmod(0o777)
    with pytest.raises(PoolDirectoryError, match="others"):
        prepare_directory(shared)
    with pytest.raises(OSError):
        prepare_directory(tmp_path / "note" / "pool")
    with pytest.raises(PoolDirectoryError, match="one block"):
        open_store(tmp_path / "small", ON_DISK - 1)


def test_a_start_over_ten_thousand_blocks_is_quick(path: Path) -> None:
    """Under two seconds is promised; here a tenth of a second is usual."""
    small = BlockStore(_prepared(path), IDENTITY, 100, 1 << 30)
    for number in range(10_000):
        small.write(number.to_bytes(2, "big") + bytes(30), [bytes(100)])
    small.close()
    start = time.monotonic()
    again = BlockStore(path, IDENTITY, 100, 1 << 30)
    assert time.monotonic() - start < 2.0
    assert again.num_blocks == 10_000


def _prepared(path: Path) -> Path:
    prepare_directory(path)
    return path


def test_clearing_takes_what_was_forgotten_and_what_is_pinned(path: Path) -> None:
    store = open_store(path)
    for number in range(3):
        store.write(name(number), [content(number)])
    store.set_pinned([name(0)])
    store._forget(name(1))
    assert store.clear() == 3
    assert not list(store.rank.glob("??/*")) and store.num_blocks == 0
