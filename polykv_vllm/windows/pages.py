# SPDX-License-Identifier: Apache-2.0
"""Raw pages: which one has which 32 tokens of the cache, and which may be taken.

A granule is 32 tokens of one physical block, named by its slot // 32. A page that some
running request holds is never taken. The others stay with their granules as long as
nobody needs them: those that were held last longest, for who continues from there is
likely to come back.
"""

from collections import OrderedDict
from collections.abc import Iterable

from polykv_vllm.windows.sizes import PAGE_TOKENS


class PagesExhausted(RuntimeError):
    """More pages are held than there are: more requests run than were planned for."""


class RawPages:
    """The pages of one KV cache group.

    Args:
        num_pages: How many there are.

    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._page_of: dict[int, int] = {}
        self._granule_of: list[int | None] = [None] * num_pages
        self._valid_from = [0] * num_pages
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        # Nobody holds these, oldest first: prompts' inner pages, and windows' pages.
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Pages of running requests."""
        return self.num_pages - len(self._free) - self.num_unheld

    @property
    def num_unheld(self) -> int:
        """Pages that have tokens of the cache and that nobody holds."""
        return len(self._spare) + len(self._kept)

    def find(self, granule: int) -> int | None:
        """Return the page of a granule, None where there is none."""
        return self._page_of.get(granule)

    def valid_from(self, page: int) -> int:
        """Return the first token of a page's granule that it has, 0 to 31.

        It has all that were written from there on.
        """
        return self._valid_from[page]

    def set_valid_from(self, page: int, token: int) -> None:
        """Say which tokens a page has from now on."""
        assert 0 <= token < PAGE_TOKENS
        self._valid_from[page] = token

    def is_held(self, page: int) -> bool:
        """Whether any request holds a page."""
        return self._holders[page] > 0

    def hold(self, page: int) -> None:
        """Keep a page for one more request."""
        if not self._holders[page]:
            self._spare.pop(page, None)
            self._kept.pop(page, None)
        self._holders[page] += 1

    def release(self, page: int, keep: bool) -> None:
        """End one request's hold.

        Args:
            page: The page.
            keep: Whether it should outlive the pages that are merely spare.

        """
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._granule_of[page] is None:
            self._free.append(page)
        elif keep:
            self._keep(page)
        else:
            self._spare[page] = None

    def touch(self, page: int) -> None:
        """Note that a page was read; nothing changes for one that is held."""
        if not self._holders[page] and self._granule_of[page] is not None:
            self._spare.pop(page, None)
            self._kept.pop(page, None)
            self._keep(page)

    def take(self, granule: int) -> int:
        """Give a granule a page, held once; that of an unheld granule if need be.

        Raises:
            PagesExhausted: All are held.

        """
        self.drop(granule)
        page = self._take_free(self._spare, self._kept)
        if page is None:
            raise PagesExhausted(
                f"all {self.num_pages} raw pages are held by running requests: more "
                "run than the windows were planned for"
            )
        self._assign(page, granule)
        self._holders[page] = 1
        return page

    def take_spare(self, granule: int, written: set[int]) -> int | None:
        """Give a granule a page that no window has; None where there is none.

        Args:
            granule: It.
            written: Pages that this step writes already.

        """
        self.drop(granule)
        oldest = next(iter(self._spare), None)
        page = self._take_free(*([] if oldest in written else [self._spare]))
        if page is None:
            return None
        self._assign(page, granule)
        self._spare[page] = None
        return page

    def drop(self, granule: int) -> None:
        """Forget the page of a granule, whose tokens are others now."""
        page = self._page_of.pop(granule, None)
        if page is None:
            return
        self._granule_of[page] = None
        if not self._holders[page]:
            self._spare.pop(page, None)
            self._kept.pop(page, None)
            self._free.append(page)

    def drop_all(self, granules: Iterable[int]) -> None:
        """Forget the pages of granules."""
        for granule in granules:
            self.drop(granule)

    def move(self, page: int, granule: int) -> None:
        """Let a held page be that of another granule with the same tokens."""
        assert self._holders[page]
        self.drop(granule)
        old = self._granule_of[page]
        if old is not None:
            del self._page_of[old]
        self._assign(page, granule, self._valid_from[page])

    def _assign(self, page: int, granule: int, valid_from: int = 0) -> None:
        self._page_of[granule] = page
        self._granule_of[page] = granule
        self._valid_from[page] = valid_from

    def _keep(self, page: int) -> None:
        """Put a page among those to keep, of which there is room for half of all."""
        self._kept[page] = None
        if len(self._kept) > self.num_pages // 2:
            oldest, _ = self._kept.popitem(last=False)
            self._spare[oldest] = None
            self._spare.move_to_end(oldest, last=False)

    def _take_free(self, *unheld: "OrderedDict[int, None]") -> int | None:
        """Take a page out of the free ones, or the oldest of others."""
        if self._free:
            return self._free.pop()
        for pages in unheld:
            if pages:
                page, _ = pages.popitem(last=False)
                granule = self._granule_of[page]
                assert granule is not None
                del self._page_of[granule]
                return page
        return None
