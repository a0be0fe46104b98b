# SPDX-License-Identifier: Apache-2.0
"""A batch as work lists: what `attend_kernel` and `finish_kernel` go through.

Built once for all layers, on the host, from block tables and lengths. The lists have
fixed capacity and their lengths are read on the device, so a launch's grid does not
depend on the batch.

A request whose query rows fit one item is split: every split of 512 tokens is an item
with a state of its own, and a split that several such requests read from the same
blocks is one item with the rows of them all (the prefix forest says which; a segment
counts in whole splits, its ragged ends are everyone's own). A longer chunk of a prompt
is chained: one item for each block of its rows, one state.
"""

from dataclasses import dataclass

import numpy as np
import torch

from polykv_vllm.kernels.triton.config import LARGE_ROWS, small_rows

SPLIT_TOKENS = 512
TILE_TOKENS = 128
ITEM_FIELDS = 6


@dataclass(frozen=True, eq=False)
class WorkList:
    """Items of one shape: int32 `[capacity, 6]`, their number `[1]`, query rows."""

    items: torch.Tensor
    count: torch.Tensor
    rows: int


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A batch for the kernels; all tensors int32 on the device of the cache.

    Attributes:
        block_table: `[num_reqs, max_num_blocks]`.
        lists: Work lists, those of small items first.
        item_tokens: Tokens of the items.
        tokens: Rows of the query that belong to requests.
        num_tokens: `[1]`, how many of `tokens` count.
        token_end: By row of the query: keys before this position are seen.
        token_slot: Where its partial states begin.
        token_parts: How many it has.
        token_split: The split of its first one.
        num_slots: Slots of partial states.
        group: Query heads per KV head, for which the lists were made.
        window: Sliding window or -1.

    """

    block_table: torch.Tensor
    lists: tuple[WorkList, ...]
    item_tokens: torch.Tensor
    tokens: torch.Tensor
    num_tokens: torch.Tensor
    token_end: torch.Tensor
    token_slot: torch.Tensor
    token_parts: torch.Tensor
    token_split: torch.Tensor
    num_slots: int
    group: int
    window: int


class _Builder:
    """Collects items and their tokens."""

    def __init__(self, group: int) -> None:
        self.group, self.small = group, small_rows(group)
        self.items: dict[int, list[tuple[int, ...]]] = {self.small: [], LARGE_ROWS: []}
        self.item_tokens: list[int] = []

    def tokens(self, tokens: "np.ndarray | range") -> int:
        """Append tokens; return where they begin."""
        first = len(self.item_tokens)
        self.item_tokens.extend(int(token) for token in tokens)
        return first

    def add(
        self, request: int, first: int, count: int, splits: range, chained: bool
    ) -> None:
        """Add one item for each split, or one for all if chained."""
        rows = self.small if count * self.group <= self.small else LARGE_ROWS
        items = self.items[rows]
        if chained:
            if len(splits):
                items.append((request, first, count, splits.start, splits.stop, 1))
            return
        for split in splits:
            items.append((request, first, count, split, split + 1, 0))


def build_plan(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    group: int,
    window: int = -1,
    segments: torch.Tensor | None = None,
    readers: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Build the work lists of a batch.

    Args:
        block_table: `[num_reqs, max_num_blocks]` int32, on the CPU or the device.
        seq_lens: `[num_reqs]` int32 on the CPU, the query tokens included.
        query_start_loc: `[num_reqs + 1]` int32 on the CPU.
        group: Query heads per KV head.
        window: Sliding window or -1.
        segments: `PrefixForest.segments`, of the same batch and window.
        readers: `PrefixForest.readers`.
        device: Where the cache is.

    Raises:
        NotImplementedError: A token's query heads of one KV head do not fit an item.

    """
    if group > LARGE_ROWS:
        raise NotImplementedError(
            f"{group} query heads per KV head; the Triton kernels take up to "
            f"{LARGE_ROWS}"
        )
    starts = query_start_loc.numpy().astype(np.int64)
    lens = seq_lens.numpy().astype(np.int64)
    per_token = _token_arrays(starts, lens, group, window)
    builder = _Builder(group)
    covered = _shared_items(builder, starts, segments, readers)
    for request, length in enumerate(lens.tolist()):
        first, last = int(starts[request]), int(starts[request + 1])
        if first == last:
            continue
        if (last - first) * group > LARGE_ROWS:
            _chained_items(builder, request, first, last, per_token["end"], window)
            continue
        begin = int(per_token["split"][first])
        own = builder.tokens(range(first, last))
        for split in range(begin, -(-length // SPLIT_TOKENS)):
            if (request, split) not in covered:
                builder.add(
                    request, own, last - first, range(split, split + 1), chained=False
                )
    return _to_device(builder, block_table, per_token, group, window, device)


def _token_arrays(
    starts: np.ndarray, lens: np.ndarray, group: int, window: int
) -> dict[str, np.ndarray]:
    """Return what is known of each row of the query, and the rows in use."""
    count = int(starts[-1]) if len(starts) else 0
    queries = np.diff(starts)
    request = np.repeat(np.arange(len(lens)), queries)
    tokens = np.arange(starts[0] if len(starts) else 0, count)
    end = lens[request] - queries[request] + (tokens - starts[request]) + 1
    # All rows of a request have their first state at the split of its first row.
    first_end = lens - queries + 1
    begin = np.maximum(first_end - window, 0) if window > 0 else np.zeros_like(lens)
    split = begin // SPLIT_TOKENS
    chained = queries * group > LARGE_ROWS
    parts = np.where(chained, 1, -(-lens // SPLIT_TOKENS) - split)[request]
    out = {"tokens": tokens}
    slots = np.cumsum(parts) - parts
    for name, values in (
        ("end", end),
        ("parts", parts),
        ("slot", slots),
        ("split", split[request]),
    ):
        full = np.zeros(max(count, 1), dtype=np.int64)
        full[tokens] = values
        out[name] = full
    out["num_slots"] = np.asarray(max(int(parts.sum()), 1))
    return out


def _shared_items(
    builder: _Builder,
    starts: np.ndarray,
    segments: torch.Tensor | None,
    readers: torch.Tensor | None,
) -> set[tuple[int, int]]:
    """Add the splits that requests read together; return (request, split) of them."""
    covered: set[tuple[int, int]] = set()
    if segments is None or readers is None:
        return covered
    tiles = SPLIT_TOKENS // TILE_TOKENS
    most = LARGE_ROWS // builder.group
    for begin, end, first, count in segments.tolist():
        splits = range(-(-begin // tiles), end // tiles)
        if not len(splits):
            continue
        requests = readers[first : first + count].tolist()
        tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in requests])
        for i in range(0, len(tokens), most):
            chunk = tokens[i : i + most]
            at = builder.tokens(chunk)
            builder.add(requests[0], at, len(chunk), splits, chained=False)
        covered |= {(request, split) for request in requests for split in splits}
    return covered


def _chained_items(
    builder: _Builder,
    request: int,
    first: int,
    last: int,
    ends: np.ndarray,
    window: int,
) -> None:
    most = LARGE_ROWS // builder.group
    own = builder.tokens(range(first, last))
    for token in range(first, last, most):
        count = min(most, last - token)
        begin = max(int(ends[token]) - window, 0) if window > 0 else 0
        end = int(ends[token + count - 1])
        at = own + token - first
        splits = range(begin // SPLIT_TOKENS, -(-end // SPLIT_TOKENS))
        builder.add(request, at, count, splits, chained=True)


def _to_device(
    builder: _Builder,
    block_table: torch.Tensor,
    per_token: dict[str, np.ndarray],
    group: int,
    window: int,
    device: torch.device | str,
) -> AttentionPlan:
    def tensor(values: "np.ndarray | list[int]") -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(device)

    lists = []
    for rows, items in builder.items.items():
        # The longest first: they end last.
        items.sort(key=lambda item: item[3] - item[4])
        table = np.asarray(items, dtype=np.int32).reshape(-1, ITEM_FIELDS)
        lists.append(WorkList(tensor(table), tensor([len(items)]), rows))
    tokens = per_token["tokens"]
    return AttentionPlan(
        block_table.to(device),
        tuple(lists),
        tensor(builder.item_tokens),
        tensor(tokens),
        tensor([len(tokens)]),
        tensor(per_token["end"]),
        tensor(per_token["slot"]),
        tensor(per_token["parts"]),
        tensor(per_token["split"]),
        int(per_token["num_slots"]),
        group,
        window,
    )
