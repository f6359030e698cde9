"""Asking for a chunk of K and V, of all heads, while the one before it is attended to, in the order of memory.

A core waits for some two dozen lines at once, however they are asked for. Lines in their order are what the hardware's
own prefetcher adds to: measured, they come a quarter sooner than a head's, which lie apart from page to page.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.attention.kv_pages import LINE, Pages
from llmc.targets.attention.sight import CHUNK
from llmc.targets.vector import i32, prefetch, registers

MOST_BYTES = 512 << 10  # of a chunk, for another is read meanwhile: measured with 1 MB of second-level cache


class ChunkStream:
    """A share of the lines of the chunk after this one, a few in each of about `ticks` calls of `ask`."""

    def __init__(self, kv: Pages, share: Any, shares: int, ticks: int, number: Any, chunks: Any) -> None:
        """This chunk is the `number`-th of `chunks`."""
        self.buffer, self.page = kv.buffer, kv.page_elements
        self.elements = LINE // _element_bytes(kv)  # of a line
        self.page_lines = self.page // self.elements
        self.lines = CHUNK * self.page_lines
        self.each = -(-self.lines // (shares * ticks))
        self.begins = number == 0  # nobody has asked for this chunk
        self._goes_on = number + 1 < chunks
        self._next = registers((1,), "int32")
        T.buffer_store(self._next, T.floordiv(share * i32(self.lines), i32(shares)), [0])

    def ask(self, pages: Any, first: int) -> None:
        """Ask for the next few, if there is a chunk after this one; its pages are pages[first : first + CHUNK]."""
        with T.If(self._goes_on), T.Then():
            at = self._next[0]
            number = T.floordiv(at, self.page_lines)
            line = at - number * self.page_lines
            place = T.cast(pages[first + number], "int64") * self.page + line * self.elements
            for one in range(self.each):
                prefetch(self.buffer.access_ptr("r", offset=place + one * self.elements), far=True)
            T.buffer_store(self._next, T.min(at + self.each, self.lines - self.each), [0])


def streams(kv: Pages) -> bool:
    """Whether chunks of these pages are small enough, and are multiplied so quickly that memory is waited for."""
    return kv.fetches > 0 and CHUNK * kv.page_elements * _element_bytes(kv) <= MOST_BYTES


def _element_bytes(kv: Pages) -> int:
    _, _, size = kv.span_of(0, 0)
    return size
