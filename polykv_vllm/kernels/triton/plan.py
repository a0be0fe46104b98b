# SPDX-License-Identifier: Apache-2.0
"""A batch as work lists: what `attend_kernel` and `finish_kernel` go through.

Built once for all layers with plain torch operations on the device of the block
tables, which the host neither reads nor waits for: it knows bounds, and from them the
capacity of each list. The lists' lengths are on the device, so a launch's grid does
not depend on what the batch shares. The same operations run on a CPU.

A request whose query rows fit one item is split: it has a state for every split of 512
tokens. (token, split) pairs that read the same blocks are one item, whoever the tokens
belong to: shared prefixes are found split by split from the block tables, so nested
ones need no tree. A longer chunk of a prompt is chained: one item for each block of
its rows, one state.
"""

from dataclasses import dataclass

import torch

from polykv_vllm.kernels.triton.config import LARGE_ROWS, small_rows

SPLIT_TOKENS = 512
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
        lists: Work lists, those of small items first, chunks of prompts last.
        item_tokens: Tokens of the items.
        tokens: Rows of the query that belong to requests.
        num_tokens: `[1]`, how many of `tokens` count.
        token_end: By row of the query: keys before this position are seen.
        token_slot: Where its partial states begin.
        token_parts: How many it has.
        token_split: The split of its first one.
        num_slots: Slots of partial states, at least as many as the batch needs.
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


@dataclass(frozen=True)
class PlanBounds:
    """What the host knows of a batch: capacities, and which lists stay empty.

    Attributes:
        num_tokens: Rows of the query, exactly.
        num_slots: Partial states, at most.
        num_chunks: Items of chunks of prompts, exactly.
        splits: Splits of the longest request, at most.
        largest_rows: Most query rows that a request that is split has.

    """

    num_tokens: int
    num_slots: int
    num_chunks: int
    splits: int
    largest_rows: int


def plan_bounds(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, group: int, window: int
) -> PlanBounds:
    """Return the bounds of a batch.

    Args:
        seq_lens: `[num_reqs]` on the CPU, each at least the request's length.
        query_start_loc: `[num_reqs + 1]` on the CPU, exact.
        group: Query heads per KV head.
        window: Sliding window or -1.

    """
    queries = query_start_loc.diff().long()
    splits = torch.where(queries > 0, _splits(seq_lens.long()), 0)
    parts = splits
    if window > 0:
        # A window touches one split more than it fills.
        parts = splits.minimum(_splits(window + queries) + 1)
    chained = queries * group > LARGE_ROWS
    most = LARGE_ROWS // group
    chunks = torch.where(chained, (queries + most - 1) // most, 0)
    own = torch.where(chained, 0, queries)
    return PlanBounds(
        int(query_start_loc[-1]),
        max(int(torch.where(chained, queries, queries * parts).sum()), 1),
        int(chunks.sum()),
        int(torch.where(chained, 0, splits).max()) if len(queries) else 0,
        int(own.max()) * group if len(queries) else 0,
    )


def build_plan(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    group: int,
    block_size: int,
    window: int = -1,
    *,
    bounds: PlanBounds | None = None,
    share: bool = True,
) -> AttentionPlan:
    """Build the work lists of a batch, without waiting for its device.

    Args:
        block_table: `[num_reqs, max_num_blocks]` int32.
        seq_lens: `[num_reqs]` int32 on the same device, the query tokens included.
        query_start_loc: `[num_reqs + 1]` int32 on the same device.
        group: Query heads per KV head.
        block_size: Tokens per block.
        window: Sliding window or -1.
        bounds: What the host knows; needed unless the tensors are on the CPU.
        share: Whether to look for splits that requests have in common.

    Raises:
        NotImplementedError: A token's query heads of one KV head do not fit an item.
        ValueError: `bounds` are needed and missing.

    """
    if group > LARGE_ROWS:
        raise NotImplementedError(
            f"{group} query heads per KV head; the Triton kernels take up to "
            f"{LARGE_ROWS}"
        )
    if bounds is None:
        if block_table.device.type != "cpu":
            raise ValueError("a plan for tensors on a GPU needs bounds from the host")
        bounds = plan_bounds(seq_lens, query_start_loc, group, window)
    requests = _Requests(seq_lens, query_start_loc, group, window)
    tokens = _Tokens(requests, bounds.num_tokens)
    share = share and bounds.splits > 0 and len(seq_lens) > 1
    leaders = (
        _leaders(requests, block_table, block_size, bounds.splits) if share else None
    )
    split_lists, split_tokens = _split_items(requests, tokens, leaders, bounds, group)
    lists = (
        *split_lists,
        _chained_items(requests, tokens, bounds, group, window),
    )
    index = tokens.index
    return AttentionPlan(
        block_table,
        lists,
        torch.cat((split_tokens, index)).int(),
        (index + requests.starts[:1]).int(),
        (requests.starts[-1:] - requests.starts[:1]).int(),
        tokens.end.int(),
        tokens.slot.int(),
        tokens.parts.int(),
        requests.first_split[tokens.request].int(),
        bounds.num_slots,
        group,
        window,
    )


def _splits(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens + SPLIT_TOKENS - 1) // SPLIT_TOKENS


class _Requests:
    """By request, int64: lengths, splits, and whether its rows are chained."""

    def __init__(
        self,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        group: int,
        window: int,
    ) -> None:
        self.starts = query_start_loc.long()
        self.queries = self.starts.diff()
        self.used = self.queries > 0
        # Of padding nothing is read, so its length may be anything.
        lens = torch.where(self.used, seq_lens.long(), 0)
        self.first_end = lens - self.queries + 1
        begin = torch.zeros_like(lens)
        if window > 0:
            begin = (self.first_end - window).clamp(min=0)
        self.first_split = begin // SPLIT_TOKENS
        self.chained = self.queries * group > LARGE_ROWS
        parts = torch.where(self.chained, 1, _splits(lens) - self.first_split)
        self.parts = torch.where(self.used, parts, 0)
        self.number = torch.arange(len(lens), device=lens.device)


class _Tokens:
    """By row of the query, int64: its request, its last key, its states."""

    def __init__(self, requests: _Requests, count: int) -> None:
        starts = requests.starts
        self.index = torch.arange(count, device=starts.device)
        found = torch.searchsorted(starts[1:].contiguous(), self.index, right=True)
        self.request = found.clamp(max=len(requests.queries) - 1)
        self.offset = self.index - starts[self.request]
        self.valid = (self.offset >= 0) & (self.index < starts[-1])
        end = requests.first_end[self.request] + self.offset
        self.end = torch.where(self.valid, end, 0)
        self.parts = torch.where(self.valid, requests.parts[self.request], 0)
        self.slot_end = self.parts.cumsum(0)
        self.slot = self.slot_end - self.parts


def _leaders(
    requests: _Requests, block_table: torch.Tensor, block_size: int, splits: int
) -> torch.Tensor:
    """Return `[num_reqs, splits]`: the first request that reads the same blocks.

    Only splits count that all rows of both see to their end. Requests are matched by a
    split's last block, then all its blocks are compared: copies of a prefix may differ
    in bits, and a row's result must not.
    """
    split = torch.arange(splits, device=block_table.device)
    first = split * SPLIT_TOKENS // block_size
    last = ((split + 1) * SPLIT_TOKENS - 1) // block_size
    span = torch.arange(-(-SPLIT_TOKENS // block_size) + 1, device=split.device)
    columns = (first[:, None] + span).minimum(last[:, None])
    blocks = block_table[:, columns.clamp(max=block_table.shape[1] - 1)]
    whole = (split + 1) * SPLIT_TOKENS <= requests.first_end[:, None]
    whole &= (requests.used & ~requests.chained)[:, None]
    alone = (1 << 32) + requests.number[:, None]  # no block has such a number
    key = torch.where(whole, blocks[..., -1].long(), alone).t().contiguous()
    key, order = key.sort(dim=1, stable=True)
    place = requests.number.expand_as(key)
    fresh = torch.ones_like(key, dtype=torch.bool)
    fresh[:, 1:] = key[:, 1:] != key[:, :-1]
    start = torch.where(fresh, place, 0).cummax(dim=1).values
    leader = torch.empty_like(order).scatter_(1, order, order.gather(1, start)).t()
    same = (blocks == blocks[leader, split]).all(dim=-1)
    return torch.where(same, leader, requests.number[:, None])


def _split_items(
    requests: _Requests,
    tokens: _Tokens,
    leaders: torch.Tensor | None,
    bounds: PlanBounds,
    group: int,
) -> tuple[tuple[WorkList, WorkList], torch.Tensor]:
    """Return the lists of (token, split) pairs, small and large, and their tokens.

    Pairs with the same split and leader become neighbours; every `LARGE_ROWS` rows of
    them are an item.
    """
    capacity, most = bounds.num_slots, LARGE_ROWS // group
    place = torch.arange(capacity, device=tokens.index.device)
    if bounds.num_tokens == 0 or bounds.largest_rows == 0:
        empty = (_no_items(place, small_rows(group)), _no_items(place, LARGE_ROWS))
        return empty, place[:0]
    num_reqs = len(requests.queries)
    owner = torch.searchsorted(tokens.slot_end, place, right=True)
    owner = owner.clamp(max=bounds.num_tokens - 1)
    request = tokens.request[owner]
    split = requests.first_split[request] + place - tokens.slot[owner]
    real = (place < tokens.slot_end[-1]) & ~requests.chained[request]
    leader = request
    if leaders is not None:
        # Splits past the bound do not exist: their pairs are not real.
        leader = leaders[request, split.clamp(max=bounds.splits - 1)]
    nothing = torch.iinfo(torch.int64).max
    key = torch.where(real, split * num_reqs + leader, nothing)
    key, order = key.sort(stable=True)
    real = key != nothing
    fresh = torch.ones_like(real)
    fresh[1:] = key[1:] != key[:-1]
    begin = torch.where(fresh, place, 0).cummax(dim=0).values
    chunk = real & ((place - begin) % most == 0)
    number = torch.where(real, chunk.cumsum(0) - 1, capacity)
    counts = torch.zeros_like(place, dtype=torch.int64)
    counts = torch.cat((counts, counts[:1])).scatter_add_(
        0, number, torch.ones_like(number)
    )
    count = counts[number]
    split, leader = key // num_reqs, key % num_reqs
    rows = torch.stack(
        (leader, place, count, split, split + 1, torch.zeros_like(place)), dim=1
    )
    fits = count * group <= small_rows(group)
    small = _compact(rows, chunk & fits, small_rows(group))
    if leaders is None and bounds.largest_rows <= small_rows(group):
        large = _no_items(place, LARGE_ROWS)
    else:
        large = _compact(rows, chunk & ~fits, LARGE_ROWS)
    return (small, large), owner[order]


def _compact(rows: torch.Tensor, chosen: torch.Tensor, item_rows: int) -> WorkList:
    """Return the chosen rows, in order, at the beginning of a list for all of them."""
    capacity = len(rows)
    target = torch.where(chosen, chosen.cumsum(0) - 1, capacity)
    items = rows.new_zeros(capacity + 1, ITEM_FIELDS)
    items.scatter_(0, target[:, None].expand_as(rows), rows)
    return WorkList(items[:capacity].int(), chosen.sum()[None].int(), item_rows)


def _no_items(like: torch.Tensor, item_rows: int) -> WorkList:
    items = torch.zeros(0, ITEM_FIELDS, dtype=torch.int32, device=like.device)
    return WorkList(items, items.new_zeros(1), item_rows)


def _chained_items(
    requests: _Requests, tokens: _Tokens, bounds: PlanBounds, group: int, window: int
) -> WorkList:
    """Return one item for each block of rows of a chunk of a prompt."""
    if bounds.num_chunks == 0:
        return _no_items(tokens.index, LARGE_ROWS)
    most = LARGE_ROWS // group
    first = tokens.valid & requests.chained[tokens.request]
    first &= tokens.offset % most == 0
    count = (requests.queries[tokens.request] - tokens.offset).clamp(max=most)
    begin = torch.zeros_like(tokens.end)
    if window > 0:
        begin = (tokens.end - window).clamp(min=0) // SPLIT_TOKENS
    end = _splits(tokens.end + count - 1)
    # Their tokens follow those of the split items.
    pairs = bounds.num_slots if bounds.largest_rows else 0
    at = tokens.index + pairs
    one = torch.ones_like(at)
    rows = torch.stack((tokens.request, at, count, begin, end, one), dim=1)
    # The longest first: they end last.
    order = torch.where(first, end - begin, -1).argsort(descending=True, stable=True)
    items = rows[order[: bounds.num_chunks]].int()
    return WorkList(items, first.sum()[None].int(), LARGE_ROWS)
