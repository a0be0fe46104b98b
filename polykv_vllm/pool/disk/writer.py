# SPDX-License-Identifier: Apache-2.0
"""The thread that writes blocks while the engine goes on.

It is handed copies, so nobody waits for it. When it falls behind, blocks are dropped:
they are then computed again by whoever needs them. After an error it rests, so that a
full disk costs one attempt every few seconds.
"""

import logging
import os
import queue
import threading
import time
from contextlib import suppress

from polykv_vllm.pool.disk.blockfile import Buffer
from polykv_vllm.pool.disk.store import BlockStore

logger = logging.getLogger("vllm.polykv")

MAX_WAITING_BYTES = 256 << 20
"""Copies that wait to be written; beyond that, blocks are dropped."""

REST_S = 5.0
_LOG_S = 60.0
_NICE = 19


class BackgroundWriter:
    """Writes blocks to a store.

    Args:
        store: Where to.
        max_waiting_bytes: See `MAX_WAITING_BYTES`.

    """

    def __init__(
        self, store: BlockStore, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._store = store
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: set[bytes] = set()
        self._queue: queue.SimpleQueue[tuple[int, bytes, Buffer] | None] = (
            queue.SimpleQueue()
        )
        self._generation = 0
        self._writing = threading.Lock()
        self._rests_until = 0.0
        self._logged = -_LOG_S
        self._thread = threading.Thread(
            target=self._run, name="polykv-pool", daemon=True
        )
        self._thread.start()

    def wants(self, name: bytes) -> bool:
        """Whether a block should be copied and submitted; counts what is dropped."""
        if not self._store.take_over() or name in self._waiting or name in self._store:
            return False
        waiting_bytes = len(self._waiting) * self._store.payload_bytes
        is_full = waiting_bytes + self._store.payload_bytes > self._max_waiting_bytes
        if is_full or time.monotonic() < self._rests_until:
            self._store.counters["dropped"] += 1
            return False
        return True

    def submit(self, name: bytes, payload: Buffer) -> None:
        """Have a block written; the buffer now belongs to the writer."""
        self._waiting.add(name)
        self._queue.put((self._generation, name, payload))

    def discard(self) -> None:
        """Write nothing of what waits; returns when no block is being written."""
        with self._writing:
            self._generation += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, then end."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (item := self._queue.get()) is not None:
            generation, name, payload = item
            try:
                with self._writing:
                    self._write(generation, name, payload)
            except Exception as error:  # whatever it is, the engine goes on
                self._fail(error)
            finally:
                self._waiting.discard(name)

    def _write(self, generation: int, name: bytes, payload: Buffer) -> None:
        if generation != self._generation:
            return  # discarded
        if time.monotonic() < self._rests_until:
            self._store.counters["dropped"] += 1
            return
        self._store.write(name, [payload])

    def _fail(self, error: Exception) -> None:
        self._store.counters["failed"] += 1
        now = time.monotonic()
        self._rests_until = now + REST_S
        if now - self._logged >= _LOG_S:
            self._logged = now
            logger.error(
                "Pool: a block could not be written to %s (%s); serving goes on from "
                "memory, and writing is tried again every %.0f s",
                self._store.rank,
                error,
                REST_S,
            )
