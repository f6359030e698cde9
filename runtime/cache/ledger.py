"""Who holds which page of one group of layers: a count of holders for each page, and the pages that nobody holds."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

NO_PAGE = -1  # in a page table, where a page was given back


class Ledger:
    """Pages 0..num_pages-1 with their counts of holders. Pages are handed out lowest first. Not locked."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.holders: NDArray[np.int32] = np.zeros(num_pages, np.int32)  # memory is taken when touched
        self._counts = self.holders.data  # reads one number faster than an array does
        self._unused = 0  # pages from here on were never handed out
        self._returned: list[int] = []  # a heap

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self.num_pages - self._unused + len(self._returned)

    def reach(self, count: int) -> int:
        """Pages up to the last that was ever handed out, once `count` more were taken."""
        return self._unused + max(0, count - len(self._returned))

    def count(self, page: int) -> int:
        """Holders of `page`."""
        return self._counts[page]

    def take(self) -> int:
        """A page that nobody held, with one holder now; there must be one."""
        if self._returned:
            page = heapq.heappop(self._returned)
        else:
            page = self._unused
            self._unused += 1
        self._counts[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`; NO_PAGE is passed over."""
        for page in pages:
            if page != NO_PAGE:
                self._counts[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less for each of `pages`; who loses the last is free again. NO_PAGE is passed over."""
        for page in pages:
            if page == NO_PAGE:
                continue
            self._counts[page] -= 1
            if not self._counts[page]:
                heapq.heappush(self._returned, page)

    def check(self, tables: Iterable[array[int]]) -> None:
        """Raise AssertionError unless the counts are exactly those of `tables`, and every other page is free once."""
        held = Counter(page for table in tables for page in table if page != NO_PAGE)
        counted = {int(page): int(self.holders[page]) for page in np.flatnonzero(self.holders[: self._unused])}
        if held != counted:
            wrong = sorted(page for page in held | counted if held[page] != counted.get(page, 0))
            page = wrong[0]
            raise AssertionError(
                f"{len(wrong)} pages with a wrong count: page {page} has {held[page]} holders, "
                f"{counted.get(page, 0)} are counted"
            )
        if sorted(self._returned) != [page for page in range(self._unused) if page not in counted]:
            raise AssertionError("the pages given back are not those that nobody holds")
