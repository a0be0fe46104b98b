# SPDX-License-Identifier: Apache-2.0
"""Which raw pages a step reads and writes, from what its requests compute.

The tokens of a step's own chunks need no pages: attention gets them. Pages that a step
reads are settled before any is given away, and each layer reads before it writes: so a
page may change its granule within a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from polykv_vllm.windows.pages import RawPages
from polykv_vllm.windows.sizes import PAGE_TOKENS, WindowSizes

_NO_PAGE = 0
"""Stands for a page of tokens that no row of the step sees; never read."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one request computes in a step.

    Attributes:
        request_id: The request.
        context: Tokens before the chunk.
        length: The same with the chunk.
        blocks: Physical blocks, enough for `length` tokens.

    """

    request_id: str
    context: int
    length: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class RawTokens:
    """What one request sees in full precision in a step.

    Attributes:
        sink_tokens: First tokens, those in the chunk included.
        sink_pages: Page of each granule of those before the chunk.
        recent_begin: First of the newest tokens before the chunk; `context` for none.
        recent_pages: Page of each granule from recent_begin // 32 up to the chunk.
        missing_pairs: Pairs of a query token and a token before the chunk that should
            be seen in full precision and is not.

    """

    sink_tokens: int
    sink_pages: list[int]
    recent_begin: int
    recent_pages: list[int]
    missing_pairs: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Tokens that go into one page after attention.

    Attributes:
        row: Index of the request in the step.
        begin: Position of the first.
        count: How many.
        page: Their page.

    """

    row: int
    begin: int
    count: int
    page: int


@dataclass(slots=True)
class StepPlan:
    """What a step reads, by request, and writes."""

    reads: list[RawTokens] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)


class WindowTable:
    """The raw pages of one KV cache group, and who holds which.

    Args:
        num_pages: Raw pages; enough for all requests that run at once.
        sizes: Of the windows.
        block_tokens: Tokens of a block, as the block tables number them.
        null_granules: Granules below this are no request's: vLLM's null block.
        sliding_window: Tokens that the layers see; -1 for all.

    """

    def __init__(
        self,
        num_pages: int,
        sizes: WindowSizes,
        block_tokens: int,
        null_granules: int = 0,
        sliding_window: int = -1,
    ) -> None:
        self.pages = RawPages(num_pages)
        self._sizes = sizes
        self._granules = block_tokens // PAGE_TOKENS
        self._null_granules = null_granules
        self._sliding = sliding_window
        self._kept_tokens = sizes.kept_tokens(sliding_window)
        self._reach = sizes.recent_tokens
        if sliding_window >= 0:
            self._reach = min(self._reach, sliding_window)
        # Pages by granule of the sequence, of each request that runs.
        self._held: dict[str, dict[int, int]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that may hold pages."""
        return len(self._held)

    def end(self, request_ids: Iterable[str]) -> None:
        """Let the pages of requests go that have ended or were preempted.

        The pages stay with their blocks until others need them.
        """
        for request_id in request_ids:
            for page in self._held.pop(request_id, {}).values():
                self.pages.release(page, keep=True)

    def forget(self, granules: Iterable[int]) -> None:
        """Forget granules whose tokens were written by others than a step."""
        self.pages.drop_all(granules)

    def plan(self, rows: Sequence[Row]) -> StepPlan:
        """Return what a step reads and writes; the pages are then those after it.

        Raises:
            PagesExhausted: More requests run than there are pages for.

        """
        plan = StepPlan([self._read(row) for row in rows])
        needed = [self._needed(row) for row in rows]
        for row, granules in zip(rows, needed, strict=True):
            self._hold_found(row, granules)
        written: set[int] = set()
        for index, (row, granules) in enumerate(zip(rows, needed, strict=True)):
            self._write_needed(index, row, granules, plan.writes, written)
        for index, (row, granules) in enumerate(zip(rows, needed, strict=True)):
            self._write_others(index, row, set(granules), plan.writes, written)
        return plan

    def _granule(self, row: Row, index: int) -> int:
        """Return the physical granule of a granule of the sequence."""
        block, inner = divmod(index, self._granules)
        return int(row.blocks[block]) * self._granules + inner

    def _find(self, row: Row, index: int) -> int | None:
        """Return the page with tokens of a request that are before its chunk.

        Where a request's block was exchanged for one with the same tokens, the page
        that it holds follows, unless that block has a page as good.
        """
        granule = self._granule(row, index)
        if granule < self._null_granules:
            return None
        found = self.pages.find(granule)
        held = self._held.get(row.request_id, {}).get(index)
        if held is None or held == found:
            return found
        if found is not None and self._is_as_good(found, held):
            return found
        self.pages.move(held, granule)
        return held

    def _is_as_good(self, page: int, other: int) -> bool:
        valid_from = self.pages.valid_from
        return self.pages.is_held(page) or valid_from(page) <= valid_from(other)

    def _first_seen(self, position: int) -> int:
        """Return the first token that a query at a position sees at all."""
        return max(0, position - self._sliding + 1) if self._sliding >= 0 else 0

    def _read(self, row: Row) -> RawTokens:
        sink_tokens, sink_pages = self._read_sinks(row)
        begin, recent_pages = self._read_recent(row)
        read = RawTokens(sink_tokens, sink_pages, begin, recent_pages)
        return replace(read, missing_pairs=self._count_missing(row, read))

    def _read_sinks(self, row: Row) -> tuple[int, list[int]]:
        wanted = self._sizes.sink_tokens
        first_seen = self._first_seen(row.context)
        if first_seen >= wanted:
            return 0, []
        pages: list[int] = []
        for index in range(-(-min(wanted, row.context) // PAGE_TOKENS)):
            begin = index * PAGE_TOKENS
            if begin + PAGE_TOKENS <= first_seen:
                pages.append(_NO_PAGE)
                continue
            page = self._find(row, index)
            if page is None or self.pages.valid_from(page):
                return begin, pages
            self.pages.touch(page)
            pages.append(page)
        return wanted, pages

    def _read_recent(self, row: Row) -> tuple[int, list[int]]:
        low = max(0, row.context - self._reach + 1)
        begin, pages = row.context, []
        for index in range((begin - 1) // PAGE_TOKENS, low // PAGE_TOKENS - 1, -1):
            if begin <= low:
                break
            page = self._find(row, index)
            if page is None:
                break
            first = index * PAGE_TOKENS + self.pages.valid_from(page)
            if first >= begin:
                break
            begin = max(low, first)
            self.pages.touch(page)
            pages.append(page)
            if first > index * PAGE_TOKENS:
                break
        return begin, pages[::-1]

    def _count_missing(self, row: Row, read: RawTokens) -> int:
        """Count the pairs that should be seen in full precision and are not."""
        sinks = min(self._sizes.sink_tokens, row.context)
        low = max(0, row.context - self._reach + 1)
        if read.sink_tokens >= sinks and read.recent_begin <= low:
            return 0
        total = 0
        for position in range(row.context, row.length):
            seen = max(self._first_seen(position), read.sink_tokens)
            recent = max(position - self._reach + 1, seen)
            sinks_end = min(sinks, max(recent, read.recent_begin))
            # Two stretches, of which the first may reach into the second.
            total += max(0, min(sinks_end, recent) - seen)
            total += max(0, max(read.recent_begin, sinks_end) - recent)
        return total

    def _needed(self, row: Row) -> list[int]:
        """Return the granules of a sequence that its next step may need."""
        end = row.length
        next_position = max(end - self._sizes.draft_tokens, 0)
        first_seen = self._first_seen(next_position) // PAGE_TOKENS
        sinks_end = -(-min(self._sizes.sink_tokens, end) // PAGE_TOKENS)
        needed = range(first_seen, sinks_end)
        low = max(0, end - self._kept_tokens)
        if low >= end:
            return list(needed)
        recent = range(low // PAGE_TOKENS, (end - 1) // PAGE_TOKENS + 1)
        return [*needed, *range(max(recent.start, needed.stop), recent.stop)]

    def _hold_found(self, row: Row, needed: Sequence[int]) -> None:
        """Hold what is there of the needed granules, and nothing else any more."""
        before = self._held.get(row.request_id, {})
        first_new = -(-row.context // PAGE_TOKENS)
        now: dict[int, int] = {}
        for index in needed:
            page = self._find(row, index) if index < first_new else None
            if page is not None:
                now[index] = page
                self.pages.hold(page)
        for page in before.values():
            self.pages.release(page, keep=False)
        self._held[row.request_id] = now

    def _write_needed(
        self,
        row_index: int,
        row: Row,
        needed: Sequence[int],
        writes: list[Write],
        written: set[int],
    ) -> None:
        """Give the needed granules of a chunk their pages."""
        held = self._held[row.request_id]
        for index in needed:
            begin = max(row.context, index * PAGE_TOKENS)
            end = min(row.length, (index + 1) * PAGE_TOKENS)
            if begin >= end:
                continue
            page = held.get(index)
            if page is None:
                page = self.pages.take(self._granule(row, index))
                self.pages.set_valid_from(page, begin % PAGE_TOKENS)
                held[index] = page
            writes.append(Write(row_index, begin, end - begin, page))
            written.add(page)

    def _write_others(
        self,
        row_index: int,
        row: Row,
        needed: set[int],
        writes: list[Write],
        written: set[int],
    ) -> None:
        """Write what else a chunk has to pages that nobody needs, the newest first.

        A request that continues from an inner place of this prompt finds its window
        there. Granules for which there is no page lose the one that they had.
        """
        first, last = row.context // PAGE_TOKENS, (row.length - 1) // PAGE_TOKENS
        for index in range(last, first - 1, -1):
            if index in needed:
                continue
            granule = self._granule(row, index)
            begin = max(row.context, index * PAGE_TOKENS)
            page = self.pages.find(granule) if begin % PAGE_TOKENS else None
            if page is None or page in written:
                page = self._take_spare(granule, begin % PAGE_TOKENS, written)
            if page is not None:
                end = min(row.length, (index + 1) * PAGE_TOKENS)
                writes.append(Write(row_index, begin, end - begin, page))
                written.add(page)

    def _take_spare(
        self, granule: int, valid_from: int, written: set[int]
    ) -> int | None:
        if self._reach <= 1:  # nobody would read it
            self.pages.drop(granule)
            return None
        page = self.pages.take_spare(granule, written)
        if page is not None:
            self.pages.set_valid_from(page, valid_from)
        return page
