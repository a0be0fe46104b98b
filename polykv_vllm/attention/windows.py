# SPDX-License-Identifier: Apache-2.0
"""Windows of full precision in a worker: the pages, and what a step does with them.

One `GroupWindows` for each KV cache group. It is told who runs when a step begins
(`seams/window_steps.py`), and asked for the step's windows by the metadata builder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polykv_vllm import ops
from polykv_vllm.metrics import WindowCounts, get_recorder
from polykv_vllm.windows.sizes import PAGE_TOKENS, WindowPlan
from polykv_vllm.windows.table import RawTokens, Row, StepPlan, WindowTable


@dataclass(frozen=True)
class StepRequests:
    """Who takes part in a step, and who does no longer.

    Attributes:
        request_ids: The batch's, in order.
        ended: Requests that have finished or were preempted since the last step.
        restored: Blocks, as vLLM's scheduler numbers them, whose tokens come from
            elsewhere: their raw copies are not those tokens'.

    """

    request_ids: Sequence[str]
    ended: Sequence[str] = ()
    restored: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class StepWindows:
    """What a step reads and writes, the same for all layers of a group.

    Attributes:
        batch: What attention is told.
        rows: `[num_written]` int64, rows of key and value that go into pages; None
            where these are the first ones.
        pages: `[num_written]` int64, their pages.
        offsets: `[num_written]` int64, their places in the pages.

    """

    batch: ops.WindowBatch
    rows: torch.Tensor | None
    pages: torch.Tensor
    offsets: torch.Tensor

    def write(
        self, key: torch.Tensor, value: torch.Tensor, window_cache: torch.Tensor
    ) -> None:
        """Put one layer's new tokens into their pages, after its attention.

        Args:
            key: `[num_tokens, num_kv_heads, head_size]`.
            value: Like `key`.
            window_cache: `[num_pages, 2, num_kv_heads, 32, head_size]`; written.

        """
        for index, states in enumerate((key, value)):
            rows = states[: len(self.pages)] if self.rows is None else states[self.rows]
            window_cache[:, index][self.pages, :, self.offsets] = rows


class GroupWindows:
    """The windows of one KV cache group.

    Args:
        plan: Of the engine.
        block_tokens: Tokens of a block in the block tables.
        block_granules: Granules of a block of vLLM's scheduler, which may be several
            of those.
        sliding_window: Tokens that the layers see; -1 for all.

    """

    def __init__(
        self,
        plan: WindowPlan,
        block_tokens: int,
        block_granules: int,
        sliding_window: int = -1,
    ) -> None:
        self._sizes = plan.sizes
        self._block_granules = block_granules
        self.table = WindowTable(
            plan.num_pages, plan.sizes, block_tokens, block_granules, sliding_window
        )
        self._step: StepRequests | None = None
        self._recorder = get_recorder()
        self._recorder_group = self._recorder.add_window_group()

    def begin_step(self, step: StepRequests) -> None:
        """Learn who runs; pages of others may be taken from now on."""
        self.table.end(step.ended)
        size = self._block_granules
        for block in step.restored:
            self.table.forget(range(block * size, (block + 1) * size))
        self._step = step

    def plan_step(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> StepWindows:
        """Settle what the step reads, and which pages its tokens go to.

        Args:
            block_table: `[num_reqs, max_num_blocks]` int32.
            seq_lens: `[num_reqs]` int32, the query tokens included.
            query_start_loc: `[num_reqs + 1]` int32.

        Raises:
            RuntimeError: No step has begun, or another batch than this one.

        """
        step, self._step = self._step, None
        if step is None or len(step.request_ids) != len(seq_lens):
            known = "none" if step is None else f"one of {len(step.request_ids)}"
            raise RuntimeError(
                f"windows are kept by request: a batch of {len(seq_lens)} came, and "
                f"{known} was announced"
            )
        starts = query_start_loc.tolist()
        tables = block_table.numpy()
        rows = []
        for index, (request_id, length) in enumerate(
            zip(step.request_ids, seq_lens.tolist(), strict=True)
        ):
            context = length - (starts[index + 1] - starts[index])
            rows.append(Row(request_id, context, length, tables[index]))
        plan = self.table.plan(rows)
        self._record(plan)
        return StepWindows(self._batch(plan.reads), *_slots(plan, rows, starts))

    def _batch(self, reads: Sequence[RawTokens]) -> ops.WindowBatch:
        sizes = self._sizes
        sinks = _padded([read.sink_pages for read in reads], sizes.sink_pages)
        recent = _padded([read.recent_pages for read in reads], sizes.recent_pages)
        return ops.WindowBatch(
            sizes.recent_tokens,
            torch.tensor([read.sink_tokens for read in reads], dtype=torch.int32),
            torch.tensor([read.recent_begin for read in reads], dtype=torch.int32),
            torch.from_numpy(sinks),
            torch.from_numpy(recent),
        )

    def _record(self, plan: StepPlan) -> None:
        pages = self.table.pages
        counts = WindowCounts(
            pages=pages.num_pages,
            held=pages.num_held,
            kept=pages.num_unheld,
            missing_pairs=sum(read.missing_pairs for read in plan.reads),
        )
        self._recorder.record_windows(counts, self._recorder_group)


def _padded(rows: Sequence[Sequence[int]], width: int) -> "np.ndarray[Any, Any]":
    """Return `[len(rows), width]` int32, -1 where a row has no entry."""
    padded = np.full((len(rows), width), -1, np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _slots(
    plan: StepPlan, rows: Sequence[Row], starts: Sequence[int]
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return, for each token that goes into a page: row, page, place."""
    pieces = np.array(
        [
            (
                starts[write.row] + write.begin - rows[write.row].context,
                write.page,
                write.begin % PAGE_TOKENS,
                write.count,
            )
            for write in plan.writes
        ],
        np.int64,
    ).reshape(-1, 4)
    counts = pieces[:, 3]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    source = np.repeat(pieces[:, 0], counts) + within
    pages = torch.from_numpy(np.repeat(pieces[:, 1], counts))
    offsets = torch.from_numpy(np.repeat(pieces[:, 2], counts) + within)
    is_front = bool((source == np.arange(len(source))).all())
    return None if is_front else torch.from_numpy(source), pages, offsets
