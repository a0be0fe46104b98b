# SPDX-License-Identifier: Apache-2.0
"""The memory of packed blocks: allocated, shared by count, copied before a write."""

import threading
from collections.abc import Iterable

import torch

from polykv_vllm.formats import FormatSpec, TileLayout

BLOCK_SIZE = 32
"""Tokens per block: what a reader copies of a shared, partly filled block."""

_GROWTH = 8  # a store grows by at least one eighth, so copies stay rare


class BlockStore:
    """Blocks of all layers of a model in one tensor; it grows as blocks are asked for.

    Several sequences may hold one block; who wants to write into such a block copies it
    first. Growing moves all bytes, so writers hold `lock`; readers may go on with the
    tensor they took, whose blocks nobody changes.

    Args:
        fmt: Format of the blocks.
        num_layers: Attention layers.
        num_kv_heads: KV heads of each layer.
        head_dim: Elements of a head.
        block_size: Tokens per block, a multiple of 16.

    Attributes:
        lock: To be held while rows are written.
        layers: One `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8 view for
            each layer; replaced when the store grows.

    Raises:
        ValueError: The head size or block size is not supported.

    """

    def __init__(
        self,
        fmt: FormatSpec,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        tile_bytes = TileLayout(fmt, head_dim, block_size).tile_bytes
        self.fmt, self.head_dim, self.block_size = fmt, head_dim, block_size
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self.block_bytes = num_layers * num_kv_heads * tile_bytes
        self.lock = threading.RLock()
        self.layers: list[torch.Tensor] = []
        self._holders: list[int] = []
        self._free: list[int] = []
        self._set_data(self._new_data(0))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, free blocks included."""
        return self._data.nbytes

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """Return how many sequences hold a block."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Return blocks for one holder; their bytes are arbitrary."""
        with self.lock:
            if count > len(self._free):
                self._grow(count - len(self._free))
            blocks = [self._free.pop() for _ in range(count)]
            for block in blocks:
                self._holders[block] = 1
            return blocks

    def reserve(self, count: int) -> None:
        """Make room for `count` blocks, exactly, in one go."""
        with self.lock:
            if count > len(self._free):
                self._grow(count - len(self._free), spare=0)

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block."""
        with self.lock:
            for block in blocks:
                self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Count one holder less of each block; a block without any is free."""
        with self.lock:
            for block in blocks:
                self._holders[block] -= 1
                if not self._holders[block]:
                    self._free.append(block)

    def private(self, block: int) -> int:
        """Return a block with the same bytes that only the caller holds.

        That is `block` itself if nobody else holds it, else a copy in its stead.
        """
        with self.lock:
            if self._holders[block] == 1:
                return block
            (copy,) = self.allocate(1)
            self._data[copy] = self._data[block]
            self.release([block])
            return copy

    def _new_data(self, num_blocks: int) -> torch.Tensor:
        slot_bytes = self.fmt.slot_bytes(self.head_dim)
        shape = (num_blocks, self.num_layers, self.num_kv_heads, self.block_size)
        return torch.empty(*shape, slot_bytes, dtype=torch.uint8)

    def _set_data(self, data: torch.Tensor) -> None:
        self._data = data
        self.layers = [data[:, layer] for layer in range(self.num_layers)]

    def _grow(self, missing: int, spare: int | None = None) -> None:
        old = self._data
        count = max(missing, old.shape[0] // _GROWTH if spare is None else spare)
        data = self._new_data(old.shape[0] + count)
        data[: old.shape[0]] = old
        self._set_data(data)
        self._holders += [0] * count
        # Popped from the end: ascending blocks lie side by side in memory.
        self._free = [*reversed(range(old.shape[0], data.shape[0])), *self._free]
