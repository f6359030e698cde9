"""K and V of a step's rows into pages of pairs of bfloat16, and queries as pairs beside them: four numbers a thread."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.fragments import COLUMNS
from llmc.targets.cuda.launch import f32, launch, local, u32
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

    def emit(self, q: Any = None) -> None:
        """K and V into their pages; and queries, where there is a buffer of pairs (M, H D / 2) for them."""
        first = 0 if q is not None else self.heads
        each = self.size // COLUMNS
        items = (self.heads + 2 * self.groups - first) * each
        with launch({"blockIdx.x": self.rows.shape[0], "blockIdx.y": -(-items // THREADS), "threadIdx.x": THREADS},
                    waits=False) as (row, block, thread):  # fmt: skip
            slot = held_int(self.places.slots[row])
            page, token = held_int(self.places.page(self.places.seqs[row], slot)), held_int(T.floormod(slot, PAGE))
            after_launches()
            item = held_int(block * THREADS + thread)
            with T.If(item < items), T.Then():
                head, d = held_int(T.floordiv(item, each) + first), held_int(T.floormod(item, each) * COLUMNS)
                self._put(q, row, head, d, page, token)

    def _put(self, q: Any, row: Any, head: Any, d: Any, page: Any, token: Any) -> None:
        words, place = local((2,), "uint32"), head * self.size + d
        with T.If(head < self.heads + self.groups):
            with T.Then():
                self._pairs(self._turned(row, place, d), words)
                self._put_turned(q, words, row, head, d, page, token)
            with T.Else():
                # Numbers that are a quarter of a head apart: what neighbours write stands together.
                first, numbers = T.floordiv(d, COLUMNS), local((COLUMNS,))
                for e in range(COLUMNS):
                    column = head * self.size + first + e * (self.size // COLUMNS)
                    T.buffer_store(numbers, self.rows[row, column], [e])
                self._pairs(numbers, words)
                group = head - self.heads - self.groups
                for e in range(COLUMNS):
                    d = first + e * (self.size // COLUMNS)
                    at = (T.floordiv(token, 2) * self.size + d) * 2 + T.floormod(token, 2)
                    T.buffer_store(self.kv, _halves(words[e // 2])[e % 2], [page, 1, group, at])

    def _put_turned(self, q: Any, words: Any, row: Any, head: Any, d: Any, page: Any, token: Any) -> None:
        def key() -> None:
            both = local((2,), "uint16")
            for i in range(2):
                for which, half in enumerate(_halves(words[i])):
                    T.buffer_store(both, half, [which])
                at = T.ramp(((T.floordiv(d, 2) + i) * PAGE + token) * 2, 1, 2)
                T.buffer_store(self.kv, both[T.ramp(0, 1, 2)], [page, 0, head - self.heads, at])

        if q is None:
            key()
            return
        with T.If(head < self.heads):
            with T.Then():
                at = T.ramp(T.floordiv(head * self.size + d, 2), 1, 2)
                T.buffer_store(q, words[T.ramp(0, 1, 2)], [row, at])
            with T.Else():
                key()

    def _four(self, x: Any, row: Any, place: Any) -> Any:
        numbers = local((COLUMNS,))
        T.buffer_store(numbers, x[row, T.ramp(place, 1, COLUMNS)], [T.ramp(0, 1, COLUMNS)])
        return numbers

    def _pairs(self, numbers: Any, words: Any) -> None:
        for i in range(2):
            T.buffer_store(words, bf16_pair(numbers[2 * i], numbers[2 * i + 1]), [i])

    def _turned(self, row: Any, place: Any, d: Any) -> Any:
        """Four numbers of a head, turned as targets/cuda/rope.py says."""
        numbers = self._four(self.rows, row, place)
        if self.table is None:
            return numbers
        turned = int(self.table.shape[1])
        with T.If(d < turned), T.Then():
            if self.layout == "half":
                self._turn_halves(numbers, row, place, d, turned // 2)
            else:
                self._turn_neighbours(numbers, row, d, turned // 2)
        return numbers

    def _turn_halves(self, numbers: Any, row: Any, place: Any, d: Any, half: int) -> None:
        second = held_int(T.Select(d >= half, 1, 0))
        angle = d - second * half
        others = self._four(self.rows, row, place + half - second * (2 * half))
        cosines, sines = (self._four(self.table, row, angle + side * half) for side in range(2))
        sign = T.Select(second != 0, f32(1), f32(-1))
        for e in range(COLUMNS):
            T.buffer_store(numbers, numbers[e] * cosines[e] + others[e] * sines[e] * sign, [e])

    def _turn_neighbours(self, numbers: Any, row: Any, d: Any, half: int) -> None:
        others, angle = local((COLUMNS,)), T.floordiv(d, 2)
        for e in range(COLUMNS):
            T.buffer_store(others, numbers[e ^ 1], [e])
        for e in range(COLUMNS):
            cosine, sine = (self.table[row, angle + e // 2 + side * half] for side in range(2))
            T.buffer_store(numbers, numbers[e] * cosine + others[e] * sine * f32(e % 2 * 2 - 1), [e])


def _halves(pair: Any) -> list[Any]:
    return [T.cast(pair & u32(0xFFFF), "uint16"), T.cast(pair >> u32(16), "uint16")]
