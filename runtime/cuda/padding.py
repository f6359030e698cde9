"""Index arrays of a step filled up to sizes that come again: of rows, sequences, pages and rows with logits.

A device's memory manager keeps a block for each size that a step ever had, and a captured step is for one set of sizes:
so there are few sizes. Rows that are added are those of one more sequence, of token 0, whose pages are the pool's spare
ones: to the kernels it is a sequence like others, and no row sees another sequence's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import pages_for
from llmc.runtime.loading.manifest import PAGE_TOKENS

I32 = NDArray[np.int32]

_ALIGN_INTS = 16  # 64 bytes
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_STRIDE = 256  # of sizes above
SPARE_PAGES = pages_for(_STRIDE)  # of the rows that are added at most


def size_for(count: int) -> int:
    """The least size that holds so many.

    >>> [size_for(count) for count in (1, 5, 33, 512, 513)]
    [1, 8, 48, 512, 768]
    """
    return next((size for size in _SIZES if size >= count), -(-count // _STRIDE) * _STRIDE)


def pages_size(count: int) -> int:
    """The least size of lists of pages that holds so many: powers of two from 64 pages (1,024 tokens) on.

    >>> [pages_size(count) for count in (1, 65, 300)]
    [64, 128, 512]
    """
    return max(64, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Sizes:
    """Of the index arrays of a step: `groups` lists of `pages` pages each; `sources`: pages of encoded texts, or 0."""

    rows: int
    sequences: int
    pages: int
    wanted: int
    groups: int
    sources: int = 0

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the arrays, in the order of runner.py."""
        n, s = self.rows, self.sequences
        shapes: list[tuple[int, ...]] = [(n,), (n,), (n,), (n,), (s, 2), (s + 1,), *[(self.pages,)] * self.groups]
        shapes.append((self.wanted,))
        return [*shapes, (s,), (s + 1,), (self.sources,)] if self.sources else shapes

    @cached_property
    def places(self) -> list[int]:
        """Where each array begins, in ints, at multiples of 64 bytes; then the length of all."""
        places = [0]
        for shape in self.shapes:
            places.append(places[-1] + -(-prod(shape) // _ALIGN_INTS) * _ALIGN_INTS)
        return places

    @cached_property
    def spans(self) -> list[slice]:
        """Of each array among all ints."""
        return [slice(at, at + prod(shape)) for at, shape in zip(self.places, self.shapes, strict=False)]


def sizes_of(arrays: list[I32], groups: int, apart: bool = False) -> Sizes:
    """The sizes that these arrays are filled up to: always with room for the sequence of added rows.

    apart: rows and rows with logits are filled up to one size only where there are as many, so that a size tells which.
    """
    rows, sequences, wanted = len(arrays[0]), len(arrays[4]), len(arrays[6 + groups])
    with_sources = len(arrays) > 7 + groups
    padded, padded_wanted = size_for(rows), size_for(wanted)
    if apart and padded_wanted == padded and wanted != rows:
        padded_wanted = size_for(padded + 1)
    pages = pages_size(len(arrays[6]) + pages_for(padded - rows))
    sources = pages_size(len(arrays[-1]) + 1) if with_sources else 0
    return Sizes(padded, size_for(sequences) + 1, pages, padded_wanted, groups, sources)


def fill(into: I32, arrays: list[I32], sizes: Sizes, spare: int) -> None:
    """Write the arrays, filled up, into one of `sizes.places[-1]` ints. `spare`: the first of the spare pages."""
    into[:] = 0
    parts = [into[span] for span in sizes.spans]
    for part, array in zip(parts, arrays, strict=True):
        part[: array.size] = array.reshape(-1)
    indptr, rows, count, pages = parts[5], len(arrays[0]), len(arrays[4]), int(arrays[5][-1])
    added, added_pages = sizes.rows - rows, pages_for(sizes.rows - rows)
    indptr[count + 1 : -1] = pages  # sequences of no rows, and then that of the added ones
    indptr[-1] = pages + added_pages
    for listed in parts[6 : 6 + sizes.groups]:
        listed[pages:] = spare
    if added:
        _add_rows(parts, sizes, rows, pages)
    if sizes.sources:
        lengths, ends, ids = parts[-3:]
        end = len(arrays[-1])
        lengths[count:], ends[count + 1 : -1], ends[-1] = 1, end, end + 1
        ids[end:] = spare
    assert added <= PAGE_TOKENS * SPARE_PAGES


def _add_rows(parts: list[I32], sizes: Sizes, rows: int, pages: int) -> None:
    """Rows beyond the first so many: one sequence more, whose pages come behind so many others."""
    _, positions, seqs, slots, *_ = parts
    added = np.arange(sizes.rows - rows, dtype=np.int32)
    positions[rows:] = slots[rows:] = added
    seqs[rows:] = sizes.sequences - 1
    own = np.arange(pages_for(len(added)), dtype=np.int32)
    for listed in parts[6 : 6 + sizes.groups]:
        listed[pages : pages + len(own)] += own
