# SPDX-License-Identifier: Apache-2.0
"""Which blocks the rows of a batch hold, and what a forward pass does to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polykv_vllm import ops
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.hf.blocks import BlockStore


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass over new tokens, the same for all layers.

    Attributes:
        start: Tokens per row before it, padding included.
        num_tokens: New tokens per row, padding included.
        slot_mapping: `[rows * num_tokens]` int64, -1 for padding.
        real: `[num_real]` int64, which of these are not padding; None: all.
        batch: What attention needs, for the rows that are not padding.

    """

    start: int
    num_tokens: int
    slot_mapping: torch.Tensor
    real: torch.Tensor | None
    batch: ops.AttentionBatch


class Sequences:
    """The rows of a batch: their blocks in a store, their lengths, their padding.

    Rows have the same length for transformers; tokens of padding are counted there but
    never stored, so that a row's real tokens lie one after the other.

    Args:
        store: Where the blocks are.
        group: Query heads per KV head.

    """

    def __init__(self, store: BlockStore, group: int) -> None:
        self.store, self._group = store, group
        self.tables: list[list[int]] = []
        self._padding: list[tuple[int, tuple[int, ...]]] = []  # start, one per row
        self._expected: tuple[int, ...] | None = None
        self._step: Step | None = None
        self._checked: torch.Tensor | None = None

    @property
    def step(self) -> Step:
        """The latest step."""
        assert self._step is not None, "a layer attends after it has stored"
        return self._step

    def private_bytes(self) -> int:
        """Bytes of the blocks that no other batch holds; shared ones count for none."""
        own = [b for row in self.tables for b in row if self.store.holders(b) == 1]
        return len(own) * self.store.block_bytes

    def fork(self, rows: int) -> "Sequences":
        """Return `rows` sequences that share the blocks of this one's only row."""
        (table,) = self.tables
        forked = Sequences(self.store, self._group)
        with self.store.lock:
            for _ in range(rows):
                self.store.share(table)
                forked.tables.append(list(table))
        return forked

    def expect_padding(self, attention_mask: torch.Tensor) -> None:
        """Note the padding of the next step: zeros of `[rows, new tokens]`, left.

        Raises:
            UnsupportedError: There are zeros elsewhere, or a row has no token.

        """
        ones = attention_mask.bool()
        padding = (~ones).sum(1)
        left = torch.arange(ones.shape[1]) >= padding.unsqueeze(1)
        if not torch.equal(left, ones) or not bool(ones.any(1).all()):
            raise UnsupportedError(
                "polykv supports padding at the left of rows with at least one token; "
                "this attention mask has other zeros"
            )
        self._expected = tuple(padding.tolist())

    def begin(self, start: int, num_tokens: int, rows: int) -> Step:
        """Return the step that appends to every row; made by the first layer of a pass.

        Args:
            start: Tokens per row that the layer holds.
            num_tokens: New ones.
            rows: Rows of the new keys.

        Raises:
            ValueError: The number of rows or of padded tokens is another one.

        """
        step = self._step
        if step and (step.start, step.num_tokens) == (start, num_tokens):
            return step
        if not self.tables:
            self.tables = [[] for _ in range(rows)]
        if rows != len(self.tables):
            raise ValueError(f"keys of {rows} rows for a cache of {len(self.tables)}")
        expected, self._expected = self._expected, None
        if expected and any(expected):
            if len(expected) != rows or max(expected) >= num_tokens:
                raise ValueError(
                    f"padding of {list(expected)} tokens was announced for {rows} "
                    f"row(s) of {num_tokens} tokens"
                )
            self._padding.append((start, expected))
        self._step = self._make_step(start, num_tokens)
        return self._step

    def hidden(self, row: int, end: int) -> int:
        """Return the tokens of padding among the first `end` of a row."""
        return sum(padding[row] for start, padding in self._padding if start < end)

    def real_tokens(self, row: int, end: int) -> torch.Tensor:
        """Return which of the first `end` tokens of a row are stored, in order."""
        real = torch.ones(end, dtype=torch.bool)
        for start, padding in self._padding:
            real[start : start + padding[row]] = False
        return real.nonzero().squeeze(1)

    def _make_step(self, start: int, num_tokens: int) -> Step:
        end, block_size = start + num_tokens, self.store.block_size
        slots, real, lens, counts = [], [], [], [0]
        for row, table in enumerate(self.tables):
            old, new = start - self.hidden(row, start), end - self.hidden(row, end)
            self._reserve(table, old, new)
            blocks, tokens = torch.tensor(table), torch.arange(old, new)
            pad = num_tokens - (new - old)
            slots.append(torch.full((pad,), -1))
            slots.append(
                blocks[tokens // block_size] * block_size + tokens % block_size
            )
            first = row * num_tokens
            real.append(torch.arange(first + pad, first + num_tokens))
            lens.append(new)
            counts.append(counts[-1] + new - old)
        batch = self._make_batch(lens, counts)
        is_padded = counts[-1] < num_tokens * len(self.tables)
        return Step(
            start,
            num_tokens,
            torch.cat(slots),
            torch.cat(real) if is_padded else None,
            batch,
        )

    def _make_batch(
        self, lens: Sequence[int], counts: Sequence[int]
    ) -> ops.AttentionBatch:
        width = max(map(len, self.tables))
        rows = [table + [0] * (width - len(table)) for table in self.tables]
        block_table = torch.tensor(rows, dtype=torch.int32)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        query_start_loc = torch.tensor(counts, dtype=torch.int32)
        forest = None
        if len(rows) > 1:
            # Without a window: such a forest suits layers with one, too.
            forest = ops.build_prefix_forest(
                block_table,
                seq_lens,
                query_start_loc,
                self.store.block_size,
                self._group,
            )
        return ops.AttentionBatch(block_table, seq_lens, query_start_loc, forest)

    def _reserve(self, table: list[int], old: int, new: int) -> None:
        """Make the blocks of tokens old..new - 1 of a row its own."""
        block_size = self.store.block_size
        if old % block_size and new > old:
            table[-1] = self.store.private(table[-1])
        table += self.store.allocate(-(-new // block_size) - len(table))

    def check_mask(self, attention_mask: torch.Tensor | None) -> None:
        """Compare the model's mask with the padding that the rows are stored with.

        Args:
            attention_mask: `[rows, tokens]` bool, or None for no padding.

        Raises:
            UnsupportedError: They differ, or the mask is not one of padding.

        """
        if attention_mask is None and not self._padding:
            return
        if attention_mask is not None and attention_mask is self._checked:
            return
        end = self.step.start + self.step.num_tokens
        expected = torch.zeros(len(self.tables), end, dtype=torch.bool)
        for row, seen in enumerate(expected):
            seen[self.real_tokens(row, end)] = True
        if attention_mask is None or not torch.equal(attention_mask, expected):
            raise UnsupportedError(
                "the attention mask hides other tokens than the polykv cache was told "
                "of. Of masks, it supports padding at the left of new tokens: call "
                "cache.expect_padding(mask of the new tokens) before the model"
            )
        self._checked = attention_mask

    def select(self, rows: Sequence[int]) -> None:
        """Let row i go on with what row `rows[i]` holds."""
        tables = [list(self.tables[row]) for row in rows]
        with self.store.lock:
            for table in tables:
                self.store.share(table)
            self.release()
        self.tables += tables
        self._padding = [
            (start, tuple(padding[row] for row in rows))
            for start, padding in self._padding
        ]
        self._step = self._checked = None

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of each row.

        Raises:
            UnsupportedError: That would cut into padding.

        """
        if any(start + max(p) > length for start, p in self._padding):
            raise UnsupportedError("a polykv cache is not cropped into its padding")
        for row, table in enumerate(self.tables):
            kept = -(-(length - self.hidden(row, length)) // self.store.block_size)
            self.store.release(table[kept:])
            del table[kept:]
        self._step = self._checked = None

    def release(self) -> None:
        """Give all blocks back."""
        for table in self.tables:
            self.store.release(table)
        self.tables.clear()

    def reset(self) -> None:
        """Forget everything."""
        self.release()
        self._padding.clear()
        self._expected = self._step = self._checked = None
