"""The KV cache: a pool of pages shared by all sequences, and the list of pages that each sequence holds.

A page keeps keys and values of 16 tokens in every layer of its group. Who holds which page is decided here, in Python;
the kernels get page tables and never see a sequence (https://arxiv.org/abs/2309.06180). A page may have several
holders. It is never written then: who is about to write gets a copy first.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from llmc.runtime.cache.ledger import NO_PAGE, Ledger
from llmc.runtime.cache.memory import LayerMemory
from llmc.runtime.errors import CacheFull
from llmc.runtime.loading.manifest import PAGE_TOKENS, KvGroup, KvLayout

Tables = list["array[int]"]
Make = Callable[[tuple[int, ...], "np.dtype[Any]"], Any]

_DTYPES = {"f32": np.float32, "bf16": np.uint16, "q8": np.uint8, "q4": np.uint8}


class Holder(Protocol):
    """What holds pages: a sequence, or a tree of prefixes."""

    @property
    def tables(self) -> Tables:
        """Pages held, for each group of layers; NO_PAGE stands for none."""
        ...


class Sequence:
    """Tokens whose keys and values are in the cache: `length` slots, in the pages of `tables` in order.

    tables: a list of pages for each group of layers, all of one length; NO_PAGE where a page was given back. position:
    of the next token; `length` until a text slides. hole: slots (first, after the last) that no row sees. source: in
    an encoder-decoder, the encoded text that it answers to; any number of sequences may share one.
    """

    __slots__ = ("hole", "length", "position", "source", "tables")

    def __init__(self, source: Sequence | None = None, groups: int = 1) -> None:
        self.length = 0
        self.position = 0
        self.hole = (0, 0)
        self.tables: Tables = [array("i") for _ in range(groups)]
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
    """Pages of all layers: `layers` arrays of shape (num_pages, *page_shape), and a ledger for each group of them.

    Memory is taken from the system when a page is first written (memory.py), so a large pool costs nothing until it is
    used. Pages are handed out lowest first, which keeps what is touched small. Safe to use from several threads.

    reclaim: called when pages are short, with the number that should be free in each group, to free some that are kept
    in case they are wanted again. It runs under `lock`, which may be taken again by the same thread.
    on_copy: told of each copy of a page, where other processes have layers of the same pages. on_use: of each `use`.
    make: gives the array of a layer of this shape and type, where pages are not in the host's memory; it is indexed by
    a place or an array of places.
    """

    def __init__(self, layout: KvLayout, tokens: int, make: Make | None = None) -> None:
        self.num_pages = pages_for(tokens)
        self.groups = layout.groups or (KvGroup(tuple(range(layout.layers))),)
        shape = (self.num_pages, *layout.page_shape)
        dtype = np.dtype(_DTYPES[layout.dtype])
        self._page_bytes = math.prod(layout.page_shape) * dtype.itemsize
        layers = range(layout.layers)
        self._memory = [] if make else [LayerMemory(shape, dtype, layer / len(layers)) for layer in layers]
        self.layers: list[Any] = [make(shape, dtype) for _ in layers] if make else [m.array for m in self._memory]
        self._windowed = any(group.window for group in self.groups)
        self.ledgers = [Ledger(self.num_pages) for _ in self.groups]
        self._used = [0] * len(self.groups)
        self.lock = threading.RLock()
        self.reclaim: Callable[[SequenceOf[int]], None] | None = None
        self.on_copy: Callable[[int, int, int], None] | None = None
        self.on_use: Callable[[int, int], None] | None = None

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds, in the group that has fewest of them."""
        return min(ledger.free for ledger in self.ledgers)

    def new_sequence(self, source: Sequence | None = None) -> Sequence:
        """An empty sequence; it holds no pages until some are reserved."""
        return Sequence(source, len(self.groups))

    def reserve_all(self, wanted: Iterable[tuple[Sequence, int]]) -> None:
        """Give each sequence pages until its tokens fit, all of them or none. CacheFull if too few are free.

        Pages that these tokens will be written to are held by nobody else afterwards.
        """
        with self.reserving(wanted):
            pass

    @contextmanager
    def reserving(self, wanted: Iterable[tuple[Sequence, int]]) -> Iterator[None]:
        """`reserve_all` for the body; if that raises, every sequence has the pages it had before.

        Only what lies before windows, where no row will look again, stays given back.
        """
        wanted = list(wanted)
        with self.lock:
            for sequence, _ in wanted if self._windowed else ():
                self.give_back(sequence)
            change = _Change(self, wanted)
            change.make()
        try:
            yield
        except BaseException:
            with self.lock:
                change.undo()
            raise
        with self.lock:
            change.keep()

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens, in the same pages: none is copied until one of them writes to it."""
        twin = self.new_sequence(sequence.source)
        with self.lock:
            twin.length, twin.position, twin.hole = sequence.length, sequence.position, sequence.hole
            twin.tables = [table[: pages_for(sequence.length)] for table in sequence.tables]
            for ledger, table in zip(self.ledgers, twin.tables, strict=True):
                ledger.share(table)
        return twin

    def truncate(self, sequence: Sequence, slots: int) -> int:
        """Keep the first `slots` slots; how many are left, to be fed on from there.

        None are left where pages that the next row would see were given back behind a window. The position goes back
        by as many as were cut.
        """
        with self.lock:
            if slots < sequence.length and not self._all_seen(sequence, slots):
                slots = 0
            self._cut_pages(sequence, pages_for(slots), len(sequence.pages))
            if slots < sequence.length:
                sequence.position = sequence.position - (sequence.length - slots) if slots else 0
                sequence.length = slots
                first, after = sequence.hole
                sequence.hole = (first, min(after, slots)) if first < slots else (0, 0)
            return sequence.length

    def release(self, sequence: Sequence) -> None:
        """Take back all pages; the sequence is empty and may be used again."""
        self.truncate(sequence, 0)

    def cut(self, sequence: Sequence, first: int, after: int) -> None:
        """Take the pages first..after-1 out of the tables: the slots behind them move up. Its hole is the caller's.

        Once pages were given back behind a window, only pages before that window may go.
        """
        with self.lock:
            self._cut_pages(sequence, first, after)
            sequence.length -= (after - first) * PAGE_TOKENS

    def insert(self, sequence: Sequence, first: int, count: int) -> None:
        """Put `count` pages before page `first`: the slots from there on move down. Its hole is the caller's.

        Layers with a window get none: no row looks there. RequestError if too few are free.
        """
        with self.lock:
            self.need([0 if group.window else count for group in self.groups])
            for group, ledger, table in zip(self.groups, self.ledgers, sequence.tables, strict=True):
                table[first:first] = array("i", (NO_PAGE if group.window else ledger.take() for _ in range(count)))
            sequence.length += count * PAGE_TOKENS

    def give_back(self, sequence: Sequence) -> None:
        """Drop pages that the next row, and so every later one, has left behind its window."""
        with self.lock:
            for group, ledger, table in zip(self.groups, self.ledgers, sequence.tables, strict=True):
                at = first_seen(group.window, sequence.length) // PAGE_TOKENS - 1
                while at >= 0 and table[at] != NO_PAGE:  # those before were given back earlier
                    ledger.drop((table[at],))
                    table[at] = NO_PAGE
                    at -= 1

    def own(self, sequence: Sequence, first: int, after: int) -> None:
        """Make pages first..after-1 the sequence's alone, copying those it shares. CacheFull if too few are free."""
        with self.lock:
            change = _Change(self, [])
            change.copies = [
                (group, sequence.tables[group], at)
                for group, ledger in enumerate(self.ledgers)
                for at in range(first, after)
                if (page := sequence.tables[group][at]) != NO_PAGE and ledger.count(page) > 1
            ]
            change.make()
            change.keep()

    def take_blocks(self, sequence: Sequence, held: Iterable[Iterable[bool]]) -> None:
        """Give an empty sequence a page for each block of a group that is held, NO_PAGE for the others.

        CacheFull if too few are free; it is empty then.
        """
        held = [list(each) for each in held]
        with self.lock:
            self.need([sum(each) for each in held])
            for ledger, table, each in zip(self.ledgers, sequence.tables, held, strict=True):
                table.extend(ledger.take() if is_held else NO_PAGE for is_held in each)

    def copy(self, group: int, old: int, new: int) -> None:
        """Copy one page of a group's layers to another one."""
        for layer in self.groups[group].layers:
            self.layers[layer][new] = self.layers[layer][old]
        if self.on_copy is not None:
            self.on_copy(group, old, new)

    def need(self, counts: SequenceOf[int]) -> None:
        """Have so many pages free in each group, reclaiming what is missing; CacheFull if that is not enough."""
        with self.lock:
            if self._short(counts) and self.reclaim is not None:
                self.reclaim(counts)
            if self._short(counts):
                raise CacheFull(
                    f"the KV cache is full: {max(counts)} more pages of {PAGE_TOKENS} tokens wanted, "
                    f"{self.free_pages} of {self.num_pages} free; load with a larger cache_tokens"
                )
            for group, (ledger, count) in enumerate(zip(self.ledgers, counts, strict=True)):
                self.use(group, ledger.reach(count))

    def use(self, group: int, pages: int) -> None:
        """Have the memory of the first `pages` pages of a group's layers for reading: they will have been used."""
        if pages <= self._used[group]:
            return
        self._used[group] = pages
        for layer in self.groups[group].layers if self._memory else ():
            self._memory[layer].use(pages * self._page_bytes)
        if self.on_use is not None:
            self.on_use(group, pages)

    def check(self, holders: Iterable[Holder]) -> None:
        """Raise AssertionError unless pages have exactly these holders, and all other pages are free."""
        holders = list(holders)
        with self.lock:
            for holder in holders:
                if isinstance(holder, Sequence) and len({len(table) for table in holder.tables}) != 1:
                    raise AssertionError("a sequence whose page tables have unequal lengths")
            for group, ledger in enumerate(self.ledgers):
                ledger.check([holder.tables[group] for holder in holders])

    def _short(self, counts: SequenceOf[int]) -> bool:
        return any(count > ledger.free for count, ledger in zip(counts, self.ledgers, strict=True))

    def _cut_pages(self, sequence: Sequence, first: int, after: int) -> None:
        for ledger, table in zip(self.ledgers, sequence.tables, strict=True):
            ledger.drop(table[first:after])
            del table[first:after]

    def _all_seen(self, sequence: Sequence, slots: int) -> bool:
        """Whether a row at slot `slots` finds all pages that it looks at."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if NO_PAGE in table[first_seen(group.window, slots) // PAGE_TOKENS : pages_for(slots)]:
                return False
        return True


class _Change:
    """Pages to take for some sequences, and to copy because others hold them too; it can be undone.

    Shared pages lose this holder only when the change is kept, so that undoing it needs no page.
    """

    def __init__(self, pool: PagePool, wanted: list[tuple[Sequence, int]]) -> None:
        self.pool = pool
        self.wanted = wanted
        self.copies = self._shared()  # (group, table, index in it)
        self._longer: list[tuple[Ledger, array[int], int]] = []  # ledger, table, its length before
        self._replaced: list[tuple[Ledger, array[int], int, int]] = []  # ledger, table, index, page before

    def make(self) -> None:
        """Take and copy. CacheFull if too few pages are free; nothing has changed then."""
        more = [(seq, count) for seq, tokens in self.wanted if (count := pages_for(tokens) - len(seq.pages)) > 0]
        copies, longer = Counter(group for group, *_ in self.copies), sum(count for _, count in more)
        self.pool.need([longer + copies[group] for group in range(len(self.pool.ledgers))])
        try:
            for sequence, count in more:
                for ledger, table in zip(self.pool.ledgers, sequence.tables, strict=True):
                    self._longer.append((ledger, table, len(table)))
                    table.extend(ledger.take() for _ in range(count))
            for group, table, at in self.copies:
                ledger = self.pool.ledgers[group]
                old, new = table[at], ledger.take()
                self._replaced.append((ledger, table, at, old))
                table[at] = new
                self.pool.copy(group, old, new)
        except BaseException:
            self.undo()
            raise

    def keep(self) -> None:
        """Let go of the shared pages that were copied."""
        for ledger, _, _, old in self._replaced:
            ledger.drop((old,))

    def undo(self) -> None:
        """Put the tables back as they were."""
        for ledger, table, at, old in self._replaced:
            ledger.drop((table[at],))
            table[at] = old
        for ledger, table, length in self._longer:
            ledger.drop(table[length:])
            del table[length:]

    def _shared(self) -> list[tuple[int, array[int], int]]:
        """Places of pages that will be written and that others hold too.

        Where all holders of a page are about to write to it, the one that has most in it keeps it: the others see none
        of the slots that it fills. That need not be the longest: pages may have been cut out before.
        """
        found: list[tuple[int, array[int], int]] = []
        writers: Counter[tuple[int, int]] = Counter()
        for sequence, tokens in sorted(self.wanted, key=lambda each: each[0].length % PAGE_TOKENS):
            if tokens <= sequence.length:
                continue
            for group, (ledger, table) in enumerate(zip(self.pool.ledgers, sequence.tables, strict=True)):
                for at in range(sequence.length // PAGE_TOKENS, min(len(table), pages_for(tokens))):
                    if table[at] == NO_PAGE or (holders := ledger.count(table[at])) == 1:
                        continue
                    writers[group, table[at]] += 1
                    if writers[group, table[at]] < holders:
                        found.append((group, table, at))
        return found


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens.

    >>> [pages_for(n) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-tokens // PAGE_TOKENS)


def first_seen(window: int, slot: int) -> int:
    """The first slot that a row at `slot` sees through a window of so many slots, its own among them; 0: no window.

    >>> first_seen(0, 100), first_seen(16, 100), first_seen(16, 3)
    (0, 85, 0)
    """
    return max(0, slot - window + 1) if window else 0
