# SPDX-License-Identifier: Apache-2.0
"""The blocks of one rank on disk: found, read, written, and the oldest let go.

There is no index beside the files: a start lists them, which for 10,000 takes tens of
milliseconds, so a killed process leaves nothing to repair. One process writes to a
rank's directory, others with the same identity read it.
"""

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from polykv_vllm.pool.disk import directory as layout
from polykv_vllm.pool.disk.blockfile import (
    HEADER_BYTES,
    Buffer,
    DamagedError,
    read_block,
    write_block,
)
from polykv_vllm.pool.disk.identity import FILE_NAME, RankIdentity

logger = logging.getLogger("vllm.polykv")

_PAGE_BYTES = 4096
_TRY_S = 5.0
_TOUCH_S = 60.0  # how often, at most, the time of a block in use is written down


class BlockStore:
    """One rank's blocks. Its methods may be called from any thread.

    Args:
        path: The pool's directory, prepared.
        identity: The rank's.
        payload_bytes: Of each block.
        max_bytes: What this rank's blocks may take on disk, those of former
            configurations included.

    Raises:
        OSError: The rank's directory cannot be made or listed.
        PoolDirectoryError: Not even one block would fit.

    """

    def __init__(
        self, path: Path, identity: RankIdentity, payload_bytes: int, max_bytes: int
    ) -> None:
        self.identity = identity
        self.payload_bytes = payload_bytes
        self.counters: Counter[str] = Counter()
        self._max_bytes = max_bytes
        self._file_bytes = _on_disk(HEADER_BYTES + payload_bytes)
        if self._file_bytes > max_bytes:
            raise layout.PoolDirectoryError(
                f"max_bytes leaves {max_bytes} bytes for this worker, and one block "
                f"takes {self._file_bytes}"
            )
        self.rank = layout.rank_directory(path, identity)
        self.rank.mkdir(mode=0o700, exist_ok=True)
        self._path = path
        self._tried_s = time.monotonic()
        self._mutex = threading.Lock()
        self._lock = layout.lock_for_writing(self.rank)
        self._blocks: OrderedDict[bytes, float] = OrderedDict()  # last time touched
        self._pinned: set[bytes] = set()
        self._former: deque[tuple[Path, int]] = deque()
        self._former_bytes = 0
        if self.is_writer and not (self.rank / FILE_NAME).exists():
            identity.save(self.rank)
        self._list()

    @property
    def is_writer(self) -> bool:
        """Whether this process writes here; else it reads what another one writes."""
        return self._lock is not None

    def take_over(self) -> bool:
        """Become the writer if the one there was has ended; tried every few seconds."""
        now = time.monotonic()
        if not self.is_writer and now - self._tried_s >= _TRY_S:
            self._tried_s = now
            with suppress(OSError):  # the directory may have gone
                lock = self._lock = layout.lock_for_writing(self.rank)
                if lock is not None:
                    logger.info("Pool: this process now writes to %s", self.rank)
                    self._list()
        return self.is_writer

    @property
    def num_blocks(self) -> int:
        """Blocks of this rank; for a reader those that it has met."""
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        """What this rank's blocks take on disk."""
        return self.num_blocks * self._file_bytes

    def __contains__(self, name: bytes) -> bool:
        """Whether a block is there: looks for the file, which others may remove."""
        with self._mutex:
            is_listed = name in self._blocks
        if self.is_writer and not is_listed:
            return False
        exists = os.path.exists(layout.block_path(self.rank, name))
        if is_listed and not exists:
            self._forget(name)
        return exists

    def read(self, name: bytes, payload: memoryview) -> bool:
        """Fill a buffer with a block and note that it was used.

        Returns:
            False when it is not there or damaged, which is logged and counted; a
            damaged file is removed. The buffer is then undefined.

        """
        path = layout.block_path(self.rank, name)
        try:
            read_block(path, self.identity.digest, name, payload)
        except FileNotFoundError:
            self._forget(name)
            self.counters["missing"] += 1
            return False
        except (DamagedError, OSError) as error:
            logger.warning("Pool: %s is not used: %s", path, error)
            self.counters["damaged"] += 1
            self._forget(name)
            if self.is_writer:
                with suppress(OSError):
                    path.unlink()
            return False
        self.counters["restored"] += 1
        self.touch([name])
        return True

    def touch(self, names: Iterable[bytes]) -> None:
        """Note that blocks were used: they will be the last to go."""
        if not self.is_writer:
            return
        now = time.monotonic()
        stale = []
        with self._mutex:
            for name in names:
                if (last := self._blocks.get(name)) is None:
                    continue
                self._blocks.move_to_end(name)
                if now - last > _TOUCH_S:
                    self._blocks[name] = now
                    stale.append(name)
        for name in stale:  # for the order after a restart
            with suppress(OSError):
                os.utime(layout.block_path(self.rank, name))

    def write(self, name: bytes, payload: Sequence[Buffer]) -> bool:
        """Write a block, letting go what was not used for longest.

        Returns:
            False when it was there already, or all others are pinned, or this
            process is a reader.

        Raises:
            OSError: The disk is full, or the directory has gone.

        """
        if not self.is_writer or name in self._blocks or not self._make_room():
            return False
        path = layout.block_path(self.rank, name)
        try:
            write_block(path, self.identity.digest, name, payload)
        except FileNotFoundError:  # the first block on its shelf
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_block(path, self.identity.digest, name, payload)
        with self._mutex:
            self._blocks[name] = time.monotonic()
        self.counters["stored"] += 1
        return True

    def set_pinned(self, names: Iterable[bytes]) -> None:
        """Name the blocks that are never let go."""
        with self._mutex:
            self._pinned = set(names)

    def clear(self) -> int:
        """Remove every block of this rank, pinned or not; returns how many."""
        if not self.is_writer:
            return 0
        with self._mutex:
            self._blocks.clear()
        found = []
        with suppress(OSError):
            found = layout.find_blocks(self.rank)  # those not listed here, too
        for block in found:
            with suppress(OSError):
                layout.block_path(self.rank, block.name).unlink()
        return len(found)

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _list(self) -> None:
        """Take what is there; a file of another size than a block's is torn."""
        if self.is_writer:
            layout.remove_unfinished(self.rank)
        whole_bytes = HEADER_BYTES + self.payload_bytes
        for block in layout.find_blocks(self.rank):
            if block.size == whole_bytes:
                self._blocks[block.name] = time.monotonic()
                continue
            self.counters["damaged"] += 1
            if self.is_writer:
                with suppress(OSError):
                    layout.block_path(self.rank, block.name).unlink()
        others = layout.other_ranks(self._path, self.identity)
        for rank, identity in others.items():
            if identity.fields.get("place") != self.identity.fields.get("place"):
                continue  # of another rank, which looks after its own
            self._take_former(rank, identity)
        if self.is_writer:
            while self._excess_bytes() > 0 and self._let_go_one():
                pass

    def _take_former(self, rank: Path, identity: RankIdentity) -> None:
        """Tell of the blocks of another configuration, and count what they take."""
        found = layout.find_blocks(rank)
        if found:
            logger.info(
                "Pool: %d blocks in %s are not read: %s",
                len(found),
                rank,
                "; ".join(self.identity.differences(identity)),
            )
        if not self.is_writer or (lock := layout.lock_for_writing(rank)) is None:
            return  # a living server's
        os.close(lock)
        for block in found:
            size = _on_disk(block.size)
            self._former.append((layout.block_path(rank, block.name), size))
            self._former_bytes += size

    def _excess_bytes(self) -> int:
        return self.num_bytes + self._former_bytes - self._max_bytes

    def _make_room(self) -> bool:
        """Let go until one more block fits."""
        while self._excess_bytes() + self._file_bytes > 0:
            if not self._let_go_one():
                self.counters["no_room"] += 1
                return False
        return True

    def _let_go_one(self) -> bool:
        """Remove a block of a former configuration, or else the one longest unused."""
        if self._former:
            path, size = self._former.popleft()
            self._former_bytes -= size
        else:
            with self._mutex:
                unpinned = (name for name in self._blocks if name not in self._pinned)
                if (name := next(unpinned, None)) is None:
                    return False
                del self._blocks[name]
            path = layout.block_path(self.rank, name)
        with suppress(OSError):
            path.unlink()
        self.counters["evicted"] += 1
        return True

    def _forget(self, name: bytes) -> None:
        with self._mutex:
            self._blocks.pop(name, None)


def _on_disk(num_bytes: int) -> int:
    """Round up to whole pages, as file systems do."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
