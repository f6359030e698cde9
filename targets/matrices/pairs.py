"""Pairs of a row and a place among the experts it uses, in the order of experts, and who multiplies which of them."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.vector import i32, registers

# Pairs that take as long as it takes to read a tile of weights, about: measured.
_READ = 6


class Pairs:
    """The pairs of up to `rows` rows, sorted: those without an expert first, whose id is below 0.

    A pair is row * used + place. Those of expert e are `order[start(e)]` to `order[end(e) - 1]`, rows ascending. What
    `sort` writes stands in memory that all threads read.
    """

    def __init__(self, ids: Any, rows: int, experts: int) -> None:
        self.ids, self.used, self.experts = ids, int(ids.shape[1]), experts
        self.order = T.alloc_buffer((rows * self.used,), "int32")
        self.ends = T.alloc_buffer((experts + 2,), "int32")  # of those without an expert, and of each expert's
        self.there = T.alloc_buffer((experts,), "int32")  # experts that have pairs
        self.work = T.alloc_buffer((experts + 1,), "int64")  # of a tile of each of these and all before it
        self.many = T.alloc_buffer((1,), "int32")  # experts that have pairs

    def sort(self, first: Any, count: Any) -> None:
        """Find the pairs of `count` rows from `first` on."""

        def key(row: Any, place: Any) -> Any:
            return T.max(self.ids[first + row, place], i32(-1)) + 1

        ends = self.ends
        with T.serial(0, self.experts + 2) as e:
            T.buffer_store(ends, i32(0), [e])
        with T.serial(0, count) as row, T.serial(0, self.used) as place:
            after = key(row, place) + 1
            T.buffer_store(ends, ends[after] + 1, [after])
        with T.serial(0, self.experts + 1) as e:
            T.buffer_store(ends, ends[e] + ends[e + 1], [e + 1])
        with T.serial(0, count) as row, T.serial(0, self.used) as place:  # starts become ends
            own = key(row, place)
            T.buffer_store(self.order, T.cast(row * self.used + place, "int32"), [ends[own]])
            T.buffer_store(ends, ends[own] + 1, [own])
        self._list()

    def _list(self) -> None:
        """Note which experts have pairs, and how much work a tile of each is."""
        T.buffer_store(self.many, i32(0), [0])
        T.buffer_store(self.work, T.int64(0), [0])
        with T.serial(0, self.experts) as e, T.If(self.end(e) > self.start(e)), T.Then():
            at = self.many[0]
            T.buffer_store(self.there, T.cast(e, "int32"), [at])
            T.buffer_store(self.work, self.work[at] + T.cast(self.end(e) - self.start(e) + _READ, "int64"), [at + 1])
            T.buffer_store(self.many, at + 1, [0])

    def start(self, expert: Any) -> Any:
        """Where the pairs of an expert begin."""
        return self.ends[expert]

    def end(self, expert: Any) -> Any:
        """Where they end."""
        return self.ends[expert + 1]

    def row(self, at: Any) -> Any:
        """The row of the `at`-th pair, less the first."""
        return T.floordiv(self.order[at], self.used)

    def place(self, at: Any) -> Any:
        """Its place among the experts of the row."""
        return T.floormod(self.order[at], self.used)

    def tiles_of(self, share: Any, shares: int, number: Any, tiles: int) -> tuple[Any, Any]:
        """The first of the `tiles` tiles of the `number`-th expert that is in a share of all work, and the one after
        the last.

        Work goes expert by expert and tile by tile, so that what a thread reads of consecutive shares stands together.
        """
        all_work = self.work[self.many[0]] * tiles
        begin, each = self.work[number] * tiles, self.work[number + 1] - self.work[number]

        def tile(work: Any) -> Any:
            past = T.max(T.floordiv(share_start(work) - begin + each - 1, each), T.int64(0))
            return T.cast(T.min(past, T.int64(tiles)), "int32")

        def share_start(number: Any) -> Any:
            return T.floordiv(T.cast(number, "int64") * all_work, T.int64(shares))

        found = registers((2,), "int32")
        T.buffer_store(found, tile(share), [0])
        T.buffer_store(found, tile(share + 1), [1])
        return found[0], found[1]
