"""K and V of many rows into pages of pairs of bfloat16, and queries as pairs: a warp has a head of eight rows.

Eight tokens of an element of K stand together in a page, and two of V. Rows are neighbours in a sequence as a rule, so
lanes have eight of them, and what a warp writes at once is whole sectors of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.fragments import COLUMNS
from llmc.targets.cuda.kv_words import THREADS, KvWords, halves, turned
from llmc.targets.cuda.launch import f32, held, launch, local, shuffled
from llmc.targets.cuda.prelude import after_launches, bytes_of
from llmc.targets.cuda.sight import held_int
from llmc.targets.cuda.target import WARP

ROWS = 8  # of a warp
LANES = WARP // ROWS  # of a row
WARPS = THREADS // WARP  # heads of a block
AT_ONCE = 4  # times eight numbers that a thread reads, at most, before it writes the first


def turns_by_halves(size: int) -> bool:
    """Whether heads of a size are twice some fours."""
    return size % (2 * COLUMNS) == 0


class KvRows(KvWords):
    """As KvWords, of heads that are twice some fours: a lane takes a four of each half of a head at a time."""

    def emit(self, q: Any = None) -> None:
        """K and V into their pages; and queries, where there is a buffer of pairs (M, H D / 2) for them."""
        first, last = 0 if q is not None else self.heads, self.heads + 2 * self.groups
        count = T.cast(self.rows.shape[0], "int32")
        grid = {
            "blockIdx.x": T.floordiv(self.rows.shape[0] + (ROWS - 1), ROWS),
            "blockIdx.y": -(-(last - first) // WARPS),
            "threadIdx.x": THREADS,
        }
        with launch(grid, waits=False) as (rows, heads, thread):
            lane = T.floormod(thread, WARP)
            own = held_int(rows * ROWS + T.floordiv(lane, LANES))
            row, self.there = held_int(T.min(own, count - 1)), own < count
            self.at = self.place(row)
            after_launches()
            head = held_int(heads * WARPS + T.floordiv(thread, WARP) + first)
            with T.If(head < last), T.Then(), T.If(head < self.heads + self.groups):
                with T.Then():
                    self._several(lane, lambda fours: self._put_turned(q, row, head, fours))
                with T.Else():
                    mate = self._mate()
                    self._several(lane, lambda fours: self._put_values(row, head, fours, mate))

    @property
    def fours(self) -> int:
        """Of half a head."""
        return self.size // (2 * COLUMNS)

    @property
    def together(self) -> int:
        """Fours of half a head that a lane reads before it writes the first."""
        return min(AT_ONCE, -(-self.fours // LANES))

    @property
    def whole(self) -> bool:
        """Whether lanes have as many fours each."""
        return self.fours % (LANES * self.together) == 0

    def _several(self, lane: Any, put: Callable[[list[Any]], None]) -> None:
        """`put` some of the lane's fours of half a head, until there are no more."""
        with T.serial(0, -(-self.fours // (LANES * self.together)), unroll=False) as turn:
            own = ((turn * self.together + i) * LANES + T.floormod(lane, LANES) for i in range(self.together))
            put([held_int(four) for four in own])

    def _inside(self, four: Any) -> Any:
        """Whether there is such a four, of a row that there is."""
        return self.there if self.whole else tirx.all(self.there, four < self.fours)

    def _read(self, row: Any, head: Any, fours: list[Any]) -> list[list[tuple[Any, Any]]]:
        """For each four and that of the other half: the element it begins at, and its numbers; those of another one,
        where there is none."""
        found = []
        for four in fours:
            four = four if self.whole else T.min(four, self.fours - 1)
            elements = [(four + half * self.fours) * COLUMNS for half in range(2)]
            found.append([(d, self.numbers(self.rows, row, head * self.size + d)) for d in elements])
        return found

    def _put_turned(self, q: Any, row: Any, head: Any, fours: list[Any]) -> None:
        """K and queries. Where halves turn each other, angles are read with them."""
        read, halved = self._read(row, head, fours), self.layout == "half" and self.turned == self.size
        angles = [self.angles(row, both[0][0]) for both in read] if halved else []
        for i, both in enumerate(read):
            if halved:
                self._turn_each_other(*(numbers for _, numbers in both), *angles[i])
            else:
                for d, numbers in both:
                    self.turn(numbers, row, head * self.size + d, d)
            for d, numbers in both:
                words = self.pairs(numbers)
                with T.If(self._inside(fours[i])), T.Then():
                    self.put_turned(q, words, row, head, d, *self.at)

    def _turn_each_other(self, first: Any, second: Any, cosines: Any, sines: Any) -> None:
        for e in range(COLUMNS):
            before = held(first[e])
            T.buffer_store(first, turned(before, second[e], cosines[e], sines[e], f32(-1)), [e])
            T.buffer_store(second, turned(second[e], before, cosines[e], sines[e], f32(1)), [e])

    def _mate(self) -> Any:
        """Whether the neighbouring row is the other token of a pair of V."""
        page, token = self.at
        same = shuffled(page, LANES, "int32") == page
        return held_int(T.Select(tirx.all(same, (shuffled(token, LANES, "int32") ^ token) == 1), 1, 0))

    def _put_values(self, row: Any, head: Any, fours: list[Any], mate: Any) -> None:
        """Rows that are a pair exchange elements: each writes two of both."""
        page, token = self.at
        odd = held_int(T.floormod(token, 2))
        for four, both in zip(fours, self._read(row, head, fours), strict=True):
            for d, numbers in both:
                words = self.pairs(numbers)
                given = shuffled(T.Select(odd != 0, words[0], words[1]), LANES)
                kept = held(T.Select(odd != 0, words[1], words[0]), "uint32")
                low, high = T.Select(odd != 0, given, kept), T.Select(odd != 0, kept, given)
                with T.If(self._inside(four)), T.Then(), T.If(mate != 0):
                    with T.Then():
                        self._put_pairs([bytes_of(low, high, 0x5410), bytes_of(low, high, 0x7632)], head, d + 2 * odd)
                    with T.Else():
                        self.put_values(words, head, [d + e for e in range(COLUMNS)], page, token)

    def _put_pairs(self, words: list[Any], head: Any, d: Any) -> None:
        """Elements d and d + 1 of two tokens of V."""
        page, token = self.at
        tokens = local((4,), "uint16")
        for i, half in enumerate(half for word in words for half in halves(held(word, "uint32"))):
            T.buffer_store(tokens, half, [i])
        at = T.ramp((T.floordiv(token, 2) * self.size + d) * 2, 1, 4)
        T.buffer_store(self.kv, tokens[T.ramp(0, 1, 4)], [page, 1, head - self.heads - self.groups, at])
