"""K and V of a step's rows into pages of pairs of bfloat16, and queries as pairs beside them: four numbers a thread."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.fragments import COLUMNS
from llmc.targets.cuda.launch import f32, launch, local, stored, u32
from llmc.targets.cuda.prelude import after_launches, bf16_pair
from llmc.targets.cuda.sight import Places, held_int

THREADS = 128


def turns_by_fours(size: int, turned: int) -> bool:
    """Whether four neighbouring numbers of a head are turned alike, with four others or among themselves."""
    return size % COLUMNS == 0 and turned % (2 * COLUMNS) == 0


class KvWords:
    """A launch over rows (M, (H + 2G) D), of which H + G heads are turned by a table (M, R) if there is one."""

    def __init__(
        self, rows: Any, kv: Any, places: Places, sizes: tuple[int, int, int], table: Any, layout: str
    ) -> None:
        self.rows, self.kv, self.places, self.table, self.layout = rows, kv, places, table, layout
        self.heads, self.groups, self.size = sizes
        self.turned = 0 if table is None else int(table.shape[1])

    def emit(self, q: Any = None) -> None:
        """K and V into their pages; and queries, where there is a buffer of pairs (M, H D / 2) for them."""
        first = 0 if q is not None else self.heads
        each = self.size // COLUMNS
        items = (self.heads + 2 * self.groups - first) * each
        with launch({"blockIdx.x": self.rows.shape[0], "blockIdx.y": -(-items // THREADS), "threadIdx.x": THREADS},
                    waits=False) as (row, block, thread):  # fmt: skip
            page, token = self.place(row)
            after_launches()
            item = held_int(block * THREADS + thread)
            with T.If(item < items), T.Then():
                head, four = held_int(T.floordiv(item, each) + first), held_int(T.floormod(item, each))
                self._put(q, row, head, four, page, token)

    def place(self, row: Any) -> tuple[Any, Any]:
        """The page of a row's slot, and the token that it is there."""
        slot = held_int(self.places.slots[row])
        return held_int(self.places.page(self.places.seqs[row], slot)), held_int(T.floormod(slot, PAGE))

    def _put(self, q: Any, row: Any, head: Any, four: Any, page: Any, token: Any) -> None:
        with T.If(head < self.heads + self.groups):
            with T.Then():
                place, d = head * self.size + four * COLUMNS, four * COLUMNS
                numbers = self.numbers(self.rows, row, place)
                self.turn(numbers, row, place, d)
                self.put_turned(q, self.pairs(numbers), row, head, d, page, token)
            with T.Else():
                # Numbers that are a quarter of a head apart: what neighbours write stands together.
                numbers, quarter = local((COLUMNS,)), self.size // COLUMNS
                for e in range(COLUMNS):
                    T.buffer_store(numbers, self.rows[row, head * self.size + four + e * quarter], [e])
                self.put_values(self.pairs(numbers), head, [four + e * quarter for e in range(COLUMNS)], page, token)

    def numbers(self, x: Any, row: Any, place: Any) -> Any:
        """Four of a row, from a place on that is seen to be a multiple of four: TVM reads others one by one."""
        numbers = local((COLUMNS,))
        T.buffer_store(numbers, x[row, T.ramp(place, 1, COLUMNS)], [T.ramp(0, 1, COLUMNS)])
        return numbers

    def pairs(self, numbers: Any) -> Any:
        """Four numbers as two words of bfloat16."""
        words = local((2,), "uint32")
        for i in range(2):
            T.buffer_store(words, bf16_pair(numbers[2 * i], numbers[2 * i + 1]), [i])
        return words

    def put_values(self, words: Any, head: Any, elements: list[Any], page: Any, token: Any) -> None:
        """Four elements of a token of V."""
        for e, d in enumerate(elements):
            at = (T.floordiv(token, 2) * self.size + d) * 2 + T.floormod(token, 2)
            T.buffer_store(self.kv, halves(words[e // 2])[e % 2], [page, 1, head - self.heads - self.groups, at])

    def put_turned(self, q: Any, words: Any, row: Any, head: Any, d: Any, page: Any, token: Any) -> None:
        """Elements d to d + 3 of a token of K, or of a query."""

        def key() -> None:
            both = local((2,), "uint16")
            for i in range(2):
                for which, half in enumerate(halves(words[i])):
                    T.buffer_store(both, half, [which])
                at = T.ramp(((T.floordiv(d, 2) + i) * PAGE + token) * 2, 1, 2)
                T.buffer_store(self.kv, both[T.ramp(0, 1, 2)], [page, 0, head - self.heads, at])

        if q is None:
            key()
            return
        with T.If(head < self.heads):
            with T.Then():
                at = stored(T.floordiv(head * self.size + d, 2), 2)
                T.buffer_store(q, words[T.ramp(0, 1, 2)], [row, at])
            with T.Else():
                key()

    def turn(self, numbers: Any, row: Any, place: Any, d: Any) -> None:
        """Four numbers of a head, turned as targets/cuda/rope.py says."""
        by_layout = self._turn_halves if self.layout == "half" else self._turn_neighbours
        if self.turned == self.size:
            by_layout(numbers, row, place, d)
        elif self.turned:
            with T.If(d < self.turned), T.Then():
                by_layout(numbers, row, place, d)

    def _turn_halves(self, numbers: Any, row: Any, place: Any, d: Any) -> None:
        half = self.turned // 2
        second = held_int(T.Select(d >= half, 1, 0))
        others = self.numbers(self.rows, row, place + half - second * (2 * half))
        cosines, sines = self.angles(row, d - second * half)
        sign = T.Select(second != 0, f32(1), f32(-1))
        for e in range(COLUMNS):
            T.buffer_store(numbers, turned(numbers[e], others[e], cosines[e], sines[e], sign), [e])

    def angles(self, row: Any, angle: Any) -> list[Any]:
        """Cosines and sines of four angles from one on."""
        return [self.numbers(self.table, row, angle + side * (self.turned // 2)) for side in range(2)]

    def _turn_neighbours(self, numbers: Any, row: Any, _: Any, d: Any) -> None:
        others, angle = local((COLUMNS,)), T.floordiv(d, 2)
        for e in range(COLUMNS):
            T.buffer_store(others, numbers[e ^ 1], [e])
        for e in range(COLUMNS):
            cosine, sine = (self.table[row, angle + e // 2 + side * (self.turned // 2)] for side in range(2))
            T.buffer_store(numbers, turned(numbers[e], others[e], cosine, sine, f32(e % 2 * 2 - 1)), [e])


def turned(number: Any, other: Any, cosine: Any, sine: Any, sign: Any) -> Any:
    """A number of a pair, turned; said once, for all launches: nvcc fuses the first product with the sum."""
    return number * cosine + other * sine * sign


def halves(pair: Any) -> list[Any]:
    """Both numbers of a pair, the first one low."""
    return [T.cast(pair & u32(0xFFFF), "uint16"), T.cast(pair >> u32(16), "uint16")]
