# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the connector: bytes of the cache to files, and back."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from polykv_vllm.pool.disk.directory import PoolDirectoryError, prepare_directory
from polykv_vllm.pool.disk.identity import RankIdentity
from polykv_vllm.pool.disk.messages import BlockAt, Orders
from polykv_vllm.pool.disk.store import BlockStore
from polykv_vllm.pool.disk.weight_watch import WeightWatch
from polykv_vllm.pool.disk.weights import UnidentifiedError
from polykv_vllm.pool.disk.writer import BackgroundWriter

logger = logging.getLogger("vllm.polykv")

_READERS = 4


class CacheBlocks:
    """The blocks of a rank's cache as bytes: the tiles of all layers, in order.

    Args:
        caches: `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8 by layer,
            on the CPU, each block contiguous.

    Raises:
        ValueError: A layer's cache is of another kind.

    """

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        for name, cache in caches.items():
            is_ours = cache.dtype == torch.uint8 and cache.dim() == 4
            if not is_ours or not cache[0].is_contiguous() or cache.is_cuda:
                raise ValueError(
                    f"the cache of {name} is {list(cache.shape)} {cache.dtype} on "
                    f"{cache.device}; kept on disk are compressed ones on the CPU"
                )
        self.layers = tuple(caches)
        self._arrays = [cache.numpy() for cache in caches.values()]
        sizes = [array[0].nbytes for array in self._arrays]
        self._ends = np.cumsum(sizes).tolist()
        self.block_bytes = int(sum(sizes))

    def copy_out(self, block_id: int) -> memoryview:
        """Return a copy of a block's bytes."""
        payload = np.empty(self.block_bytes, np.uint8)
        start = 0
        for array, end in zip(self._arrays, self._ends, strict=True):
            payload[start:end] = array[block_id].reshape(-1)
            start = end
        return payload.data

    def copy_in(self, block_id: int, payload: np.ndarray) -> None:
        """Set a block's bytes."""
        start = 0
        for array, end in zip(self._arrays, self._ends, strict=True):
            array[block_id].reshape(-1)[:] = payload[start:end]
            start = end


class PoolWorker:
    """Loads and saves blocks as ordered.

    Args:
        blocks: The cache.
        store: Where its blocks are kept.
        watch: Says when the weights are no longer those that the blocks are named by.

    """

    def __init__(
        self, blocks: CacheBlocks, store: BlockStore, watch: WeightWatch
    ) -> None:
        self._blocks = blocks
        self.store = store
        self._writer = BackgroundWriter(store)
        self._readers = ThreadPoolExecutor(_READERS, "polykv-pool-read")
        self._watch = watch
        self._is_off = False
        self._failed: set[int] = set()
        self._step_failed = False  # kept until the next step: saves may come late
        self._told: Counter[str] = Counter()

    def load(self, orders: Orders) -> None:
        """Fill blocks; those that cannot be are told by `take_failed`."""
        self._step_failed = False
        if orders.clear:
            self._writer.discard()
            removed = self.store.clear()
            logger.info("Pool: %d blocks removed from %s", removed, self.store.rank)
        if orders.pinned is not None:
            self.store.set_pinned(orders.pinned)
        if not orders.load:
            return
        if self._weights_changed():
            self._failed |= {at.block_id for at in orders.load}
            self._step_failed = True
            return
        start = perf_counter()
        done = list(self._readers.map(self._load_one, orders.load))
        self._failed |= {
            at.block_id for at, ok in zip(orders.load, done, strict=True) if not ok
        }
        self._step_failed = not all(done)
        seconds = perf_counter() - start
        self.store.counters["restore_us"] += int(seconds * 1e6)
        logger.info(
            "Pool: %d blocks restored from disk, %d failed, %.1f MB in %.1f ms",
            sum(done),
            len(done) - sum(done),
            sum(done) * self._blocks.block_bytes / 1e6,
            seconds * 1e3,
        )

    def save(self, orders: Orders) -> None:
        """Copy blocks for the writer; nothing after a failed load.

        What was computed in such a step may rest on bytes that were never loaded.
        """
        if self._step_failed or not orders.save or self._weights_changed():
            return
        for at in orders.save:
            if self._writer.wants(at.name):
                self._writer.submit(at.name, self._blocks.copy_out(at.block_id))
        self.store.touch(at.name for at in orders.save)

    def _weights_changed(self) -> bool:
        """Switch off for good when the weights were exchanged."""
        if not self._is_off and self._watch.has_changed():
            self._is_off = True
            logger.error(
                "Pool: the weights are no longer those of the model's files; until a "
                "restart nothing is stored in %s or read from it",
                self.store.rank,
            )
        return self._is_off

    def take_failed(self) -> set[int]:
        """Return the blocks of this step that could not be loaded."""
        failed, self._failed = self._failed, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last time, and the gauges."""
        now = self.store.counters.copy()
        counts = {name: now[name] - self._told[name] for name in now}
        self._told = now
        return counts | {
            "disk_blocks": self.store.num_blocks,
            "disk_bytes": self.store.num_bytes,
        }

    def close(self) -> None:
        """Write what waits and let another process write."""
        self._readers.shutdown()
        self._writer.close()
        self.store.close()

    def _load_one(self, at: BlockAt) -> bool:
        payload = np.empty(self._blocks.block_bytes, np.uint8)
        if not self.store.read(at.name, payload.data):
            return False
        self._blocks.copy_in(at.block_id, payload)
        return True


def open_worker(
    caches: Mapping[str, torch.Tensor],
    identify: Callable[[tuple[str, ...]], RankIdentity],
    path: Path,
    max_bytes: int,
    models: Iterable[torch.nn.Module],
) -> PoolWorker | None:
    """Open the store of a rank; None, and an error in the log, when it cannot be.

    Args:
        caches: See `CacheBlocks`.
        identify: Given the layers, returns what their blocks mean.
        path: The pool's directory.
        max_bytes: For this rank.
        models: Whose keys and values are cached.

    """
    try:
        blocks = CacheBlocks(caches)
        identity = identify(blocks.layers)
        prepare_directory(path)
        store = BlockStore(path, identity, blocks.block_bytes, max_bytes)
    except (OSError, ValueError, UnidentifiedError, PoolDirectoryError) as error:
        logger.error(
            "Pool: nothing is kept on disk, serving goes on from memory: %s", error
        )
        return None
    _tell(store, blocks)
    return PoolWorker(blocks, store, WeightWatch(list(models)))


def _tell(store: BlockStore, blocks: CacheBlocks) -> None:
    logger.info(
        "Pool: %s has %d blocks of %d bytes (%.1f MB)%s",
        store.rank,
        store.num_blocks,
        blocks.block_bytes,
        store.num_bytes / 1e6,
        "" if store.is_writer else "; another process writes, this one reads",
    )
