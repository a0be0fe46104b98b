# SPDX-License-Identifier: Apache-2.0
"""Raw copies of a batch's tokens in pages, for attention with windows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from polykv_vllm import ops
from polykv_vllm.ops import WINDOW_PAGE_TOKENS as PAGE
from tests.kernel_cases import Batch


@dataclass(frozen=True)
class Copies:
    """Raw keys and values of each request: `[seq_len, kv_heads, head_dim]`."""

    key: list[torch.Tensor]
    value: list[torch.Tensor]

    def select(self, requests: Sequence[int]) -> "Copies":
        """Return those of some requests."""
        return Copies(
            [self.key[r] for r in requests], [self.value[r] for r in requests]
        )

    def until(self, request: int, length: int) -> "Copies":
        """Return one request's first tokens."""
        return Copies([self.key[request][:length]], [self.value[request][:length]])


def random_copies(batch: Batch) -> Copies:
    """Draw copies that have nothing in common with what the cache holds.

    So a token that is taken from the wrong tier shows.
    """
    kv_heads, head_dim = batch.kv_cache.shape[1], batch.query.shape[-1]
    key, value = (
        [
            torch.randn(length, kv_heads, head_dim).to(batch.query.dtype)
            for _, length in batch.requests()
        ]
        for _ in ("key", "value")
    )
    return Copies(key, value)


def with_windows(
    batch: Batch,
    copies: Copies,
    sink_tokens: int | Sequence[int],
    recent_tokens: int,
    recent_begin: Sequence[int] | None = None,
    fill: int = 0xFF,
) -> Batch:
    """Return the batch with windows: only what is needed is in pages.

    Args:
        batch: Without windows.
        copies: What the pages and the chunk's rows hold.
        sink_tokens: Of all requests, or of each.
        recent_tokens: W.
        recent_begin: Of each request; None: as far back as any query sees.
        fill: Byte of the page slots that nobody needs; 0xFF makes them NaN.

    """
    requests = batch.requests()
    count = len(requests)
    sinks = [sink_tokens] * count if isinstance(sink_tokens, int) else [*sink_tokens]
    if recent_begin is None:
        recent_begin = [max(0, n - q - max(0, recent_tokens - 1)) for q, n in requests]
    writer = _PageWriter(batch, fill)
    sink_pages: list[list[int]] = []
    recent_pages: list[list[int]] = []
    for r, (queries, length) in enumerate(requests):
        context = length - queries
        first = max(recent_begin[r], context - recent_tokens + 1)
        rows = (copies.key[r], copies.value[r])
        sink_pages.append(writer.write(rows, 0, min(sinks[r], context)))
        skipped = first // PAGE - recent_begin[r] // PAGE
        pages = writer.write(rows, first, context if queries else first)
        recent_pages.append([-1] * skipped + pages)
    own = [
        torch.cat(
            [rows[r][n - q :] for r, (q, n) in enumerate(requests)]
            or [batch.query[:, :0]]
        )
        for rows in (copies.key, copies.value)
    ]
    # Pages of others lie between them, in any order.
    place = torch.randperm(len(writer.pages) + 2)
    windows = ops.WindowBatch(
        recent_tokens,
        torch.tensor(sinks, dtype=torch.int32),
        torch.tensor(recent_begin, dtype=torch.int32),
        _table(sink_pages, place),
        _table(recent_pages, place),
    )
    cache = writer.empty(len(place))
    for number, page in enumerate(writer.pages):
        cache[place[number]] = page
    return replace(batch, windows=windows, raw=ops.RawRows(*own, cache))


def _table(pages: list[list[int]], place: torch.Tensor) -> torch.Tensor:
    width = max(map(len, pages), default=0)
    table = torch.full((len(pages), width), -1, dtype=torch.int32)
    for row, numbers in zip(table, pages, strict=True):
        for entry, number in enumerate(numbers):
            if number >= 0:
                row[entry] = place[number]
    return table


class _PageWriter:
    """Fills pages one after the other."""

    def __init__(self, batch: Batch, fill: int) -> None:
        self._page = (2, batch.kv_cache.shape[1], PAGE, batch.query.shape[-1])
        self._dtype, self._fill = batch.query.dtype, fill
        self.pages: list[torch.Tensor] = []

    def empty(self, count: int) -> torch.Tensor:
        """Return `[count, 2, kv_heads, 32, head_dim]` of garbage."""
        empty = torch.empty((count, *self._page), dtype=self._dtype)
        empty.view(torch.uint8).fill_(self._fill)
        return empty

    def write(
        self, rows: tuple[torch.Tensor, torch.Tensor], begin: int, end: int
    ) -> list[int]:
        """Return the numbers of new pages with tokens begin..end and no others."""
        numbers = []
        for granule in range(begin // PAGE, -(-end // PAGE) if end > begin else 0):
            page = self.empty(1)[0]
            low, high = max(begin, granule * PAGE), min(end, (granule + 1) * PAGE)
            slots = slice(low - granule * PAGE, high - granule * PAGE)
            for kind, each in enumerate(rows):
                page[kind][:, slots] = each[low:high].transpose(0, 1)
            numbers.append(len(self.pages))
            self.pages.append(page)
        return numbers
