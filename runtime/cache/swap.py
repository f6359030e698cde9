"""The pages of a sequence in arrays of their own: to make room in the pool for a while, or to write them to a file."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.ledger import NO_PAGE
from llmc.runtime.cache.pages import PagePool, Sequence, pages_for
from llmc.runtime.errors import RequestError


class Copy(NamedTuple):
    """What a sequence was, with the bytes of its pages.

    held: for each group of layers, which of its blocks of 16 slots have a page. layers: of each layer an array
    (pages, *page_shape), the pages that its group has, in order.
    """

    length: int
    position: int
    hole: tuple[int, int]
    source: Sequence | None
    held: tuple[NDArray[np.bool_], ...]
    layers: tuple[NDArray[Any], ...]

    @property
    def pages(self) -> int:
        """Pages that must be free, in every group, to put it back."""
        return max(int(held.sum()) for held in self.held)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(layer.nbytes for layer in self.layers)


def copy_out(pool: PagePool, sequence: Sequence) -> Copy:
    """A copy of `sequence`, which stays as it is but for pages behind windows, which are given back first.

    Raises RequestError where other processes have layers of the pages.
    """
    if pool.on_copy is not None:
        raise RequestError("pages on several devices are not copied out: no sessions, and no preemption by swapping")
    with pool.lock:
        pool.give_back(sequence)
        tables = [np.array(table[: pages_for(sequence.length)], np.int64) for table in sequence.tables]
        held = tuple(table != NO_PAGE for table in tables)
        layers: list[NDArray[Any]] = [np.empty(0)] * len(pool.layers)
        for group, table, mask in zip(pool.groups, tables, held, strict=True):
            for layer in group.layers:
                layers[layer] = pool.layers[layer][table[mask]]
        return Copy(sequence.length, sequence.position, sequence.hole, sequence.source, held, tuple(layers))


def put_back(pool: PagePool, sequence: Sequence, copy: Copy) -> None:
    """Make `sequence`, an empty one, what `copy` was. CacheFull if too few pages are free; it is empty then."""
    if pool.on_copy is not None:
        raise RequestError("pages on several devices are not put back from a copy")
    assert not sequence.pages, "pages are copied into an empty sequence"
    with pool.lock:
        pool.take_blocks(sequence, [held.tolist() for held in copy.held])
        for group, table in zip(pool.groups, sequence.tables, strict=True):
            places = np.array([page for page in table if page != NO_PAGE], np.int64)
            for layer in group.layers:
                pool.layers[layer][places] = copy.layers[layer]
        sequence.length, sequence.position, sequence.hole = copy.length, copy.position, copy.hole
        sequence.source = copy.source


def swap_out(pool: PagePool, sequence: Sequence) -> Copy:
    """`copy_out`, and the sequence gives its pages back: pages that others hold too stay with them."""
    with pool.lock:
        copy = copy_out(pool, sequence)
        pool.release(sequence)
        return copy
