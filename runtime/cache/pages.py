"""The KV cache: a pool of pages shared by all sequences, and the list of pages that each sequence holds.

A page keeps keys and values of 16 tokens in every layer. Which sequence owns which page is decided here, in Python;
the kernels get page tables and never see a sequence (https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

import heapq
import math
import mmap
import threading
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import PAGE_TOKENS, KvLayout

_DTYPES = {"f32": np.float32, "bf16": np.uint16, "q8": np.uint8, "q4": np.uint8}
_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE, named since Python 3.13


class Sequence:
    """Tokens whose keys and values are in the cache: `length` slots, in the pages of `tables` in order.

    tables: a list of pages for each group of layers. position: of the next token; `length` until a text slides. hole:
    slots (first, after the last) that no row sees. source: in an encoder-decoder, the encoded text that it answers to;
    any number of sequences may share one.
    """

    __slots__ = ("hole", "length", "position", "source", "tables")

    def __init__(self, source: Sequence | None = None, groups: int = 1) -> None:
        self.length = 0
        self.position = 0
        self.hole = (0, 0)
        self.tables = [array("i") for _ in range(groups)]
        self.source = source

    @property
    def pages(self) -> array[int]:
        """Pages of the first group of layers."""
        return self.tables[0]

    @property
    def room(self) -> int:
        """Tokens that fit in the pages held."""
        return len(self.pages) * PAGE_TOKENS


class PagePool:
    """Pages of all layers: `layers` arrays of shape (num_pages, *page_shape).

    Memory is taken from the system when a page is first written, so a large pool costs nothing until it is used.
    Pages are handed out lowest first, which keeps what is touched small. Safe to use from several threads.
    """

    def __init__(self, layout: KvLayout, tokens: int) -> None:
        self.num_pages = pages_for(tokens)
        shape = (self.num_pages, *layout.page_shape)
        dtype = np.dtype(_DTYPES[layout.dtype])
        self.layers = [_zeros(shape, dtype) for _ in range(layout.layers)]
        self._unused = 0  # pages from here on were never handed out
        self._returned: list[int] = []  # a heap
        self._lock = threading.Lock()

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self.num_pages - self._unused + len(self._returned)

    def reserve_all(self, wanted: list[tuple[Sequence, int]]) -> None:
        """Give each sequence pages until its tokens fit, all of them or none. RequestError if too few are free."""
        counts = [max(0, pages_for(tokens) - len(seq.pages)) for seq, tokens in wanted]
        with self._lock:
            if sum(counts) > self.free_pages:
                raise RequestError(
                    f"the KV cache is full: {sum(counts)} more pages of {PAGE_TOKENS} tokens wanted, "
                    f"{self.free_pages} of {self.num_pages} free; load with a larger cache_tokens"
                )
            for (sequence, _), count in zip(wanted, counts, strict=True):
                sequence.pages.extend(self._take() for _ in range(count))

    def shrink(self, sequence: Sequence, pages: int) -> None:
        """Take back the pages of `sequence` after its first `pages`; its length shrinks to what still fits."""
        with self._lock:
            for page in sequence.pages[pages:]:
                heapq.heappush(self._returned, page)
            del sequence.pages[pages:]
            sequence.length = sequence.position = min(sequence.length, sequence.room)

    def release(self, sequence: Sequence) -> None:
        """Take back all pages; the sequence is empty and may be used again."""
        self.shrink(sequence, 0)

    def _take(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._unused += 1
        return self._unused - 1


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens.

    >>> [pages_for(n) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-tokens // PAGE_TOKENS)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros whose memory is taken when touched. A map starts on a memory page, so it is 64-byte aligned."""
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise RequestError(
            f"the system refuses {size} bytes for one layer of the KV cache; load with a smaller cache_tokens"
        ) from error
    return np.frombuffer(memory, dtype).reshape(shape)
