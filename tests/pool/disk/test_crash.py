# SPDX-License-Identifier: Apache-2.0
"""Writers killed with -9 at random moments: what is left is whole, or is no block.

A few rounds here; `make crash` has fifty.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from polykv_vllm.pool.disk.directory import find_blocks, prepare_directory
from polykv_vllm.pool.disk.identity import RankIdentity
from polykv_vllm.pool.disk.store import BlockStore
from polykv_vllm.pool.disk.writer import BackgroundWriter

ROUNDS = int(os.environ.get("POLYKV_CRASH_ROUNDS", "6"))
PAYLOAD = 300_000  # as a block of 32 tokens of a small model
MAX_BYTES = 60 * PAYLOAD  # little, so that writing and letting go happen at once
IDENTITY = RankIdentity({"weights": "w", "place": {"rank": 0}})


def content(name: bytes) -> bytes:
    """Return bytes that only this name has."""
    return random.Random(name).randbytes(1000) * (PAYLOAD // 1000)


def open_store(path: Path) -> BlockStore:
    prepare_directory(path)
    return BlockStore(path, IDENTITY, PAYLOAD, MAX_BYTES)


def write_for_ever(path: Path, seed: int) -> None:
    """Write new blocks until someone ends this process."""
    store = open_store(path)
    assert store.is_writer, "a stale lock"
    writer = BackgroundWriter(store, 4 * PAYLOAD)
    print("ready", flush=True)
    numbers = random.Random(seed)
    while True:
        name = numbers.randbytes(32)
        if writer.wants(name):
            writer.submit(name, content(name))
        time.sleep(0.0002)


def test_no_block_is_ever_half(tmp_path: Path) -> None:
    moments = random.Random(0)
    path = tmp_path / "pool"
    num_read, slowest_s = 0, 0.0
    for number in range(ROUNDS):
        code = (
            "import sys; from pathlib import Path; from tests.pool.disk import "
            "test_crash; test_crash.write_for_ever(Path(sys.argv[1]), "
            "int(sys.argv[2]))"
        )
        arguments = [sys.executable, "-c", code, str(path), str(number)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(moments.uniform(0.0, 0.6))
            child.kill()
        start = time.monotonic()
        store = open_store(path)
        slowest_s = max(slowest_s, time.monotonic() - start)
        assert store.is_writer, "a stale lock"
        payload = bytearray(PAYLOAD)
        for block in find_blocks(store.rank):
            assert store.read(block.name, memoryview(payload))
            assert payload == content(block.name), "another block's bytes"
            num_read += 1
        assert store.counters["damaged"] == 0
        assert not list(store.rank.glob("*/.*")), "an unfinished file was left"
        assert store.num_bytes <= MAX_BYTES
        store.close()
    assert num_read > 0
    assert slowest_s < 2.0
    print(f"{ROUNDS} kills, {num_read} blocks read, start {slowest_s * 1e3:.1f} ms")
