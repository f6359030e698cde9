"""The greatest numbers of each row, best first, and the logarithm of the sum of its exponentials.

A row is read twice. The first time gives the greatest number of each of 64 classes of columns: the least of these is
one that 64 numbers reach, so the second time only what reaches it is looked at, one by one.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.meaning import TOP
from llmc.targets.rows.rows import columns, kernel
from llmc.targets.target import Target
from llmc.targets.vector import LANES, any_at_least, exp, f32, i32, lanes, reduce_max, reduce_sum, registers, splat

_LOWEST = float("-inf")
_BLOCK = 4 * LANES  # columns that one comparison may pass over


def top(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> ids and values (M, K) of the greatest, and log of the sum of e^x (M,)."""
    width, count = int(shapes[0][1]), int(shapes[1][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, ids, values, normalizers = buffers
        most, reached = _greatest(x, row, width)
        best = _Best(reached)
        sums, one = registers((LANES,), "float32"), registers((LANES,), "float32")
        T.buffer_store(sums, splat(f32(0)), [lanes(0)])

        def add(c: Any) -> None:
            T.buffer_store(sums, sums[lanes(0)] + _exp(x[row, lanes(c)], most), [lanes(0)])

        def offer(c: Any) -> None:
            with T.If(any_at_least(x[row, lanes(c)], best.least())), T.Then(), T.serial(0, LANES) as lane:
                best.offer(x[row, c + lane], c + lane)

        def sixteen(c: Any) -> None:
            add(c)
            offer(c)

        def single(c: Any) -> None:
            T.buffer_store(one, _exp(splat(x[row, c]), most), [lanes(0)])
            T.buffer_store(sums, sums[0] + one[0], [0])
            best.offer(x[row, c], c)

        whole = width // _BLOCK * _BLOCK
        if whole:
            with T.serial(0, whole // _BLOCK) as step:
                parts = [step * _BLOCK + at for at in range(0, _BLOCK, LANES)]
                for part in parts:
                    add(part)
                greatest = x[row, lanes(parts[0])]
                for part in parts[1:]:
                    greatest = T.max(greatest, x[row, lanes(part)])
                with T.If(any_at_least(greatest, best.least())), T.Then():
                    for part in parts:
                        offer(part)
        columns(width - whole, lambda c: sixteen(whole + c), lambda c: single(whole + c))
        T.buffer_store(normalizers, most + T.log(reduce_sum(sums[lanes(0)])), [row])
        with T.serial(0, count) as place:
            T.buffer_store(ids, best.ids[place], [row, place])
            T.buffer_store(values, best.values[place], [row, place])

    return kernel(["float32", "int32", "float32", "float32"], shapes, body, parallel_rows=2)


def _exp(numbers: Any, most: Any) -> Any:
    """e^(x - most) of sixteen; of what is no number or infinite, that itself, so that a sum shows it."""
    return T.Select(numbers < splat(f32(float("inf"))), exp(numbers - splat(most)), numbers)


def _greatest(x: Any, row: Any, width: int) -> tuple[Any, Any]:
    """The greatest number of a row, and one that at least TOP of them, or all, are not less than."""
    most, both = registers((TOP,), "float32"), registers((2,), "float32")
    for at in range(0, TOP, LANES):
        T.buffer_store(most, splat(f32(_LOWEST)), [lanes(at)])
    whole = width // TOP
    if whole:
        with T.serial(0, whole) as step:
            for at in range(0, TOP, LANES):
                T.buffer_store(most, T.max(most[lanes(at)], x[row, lanes(step * TOP + at)]), [lanes(at)])
    least, greatest = (most[lanes(0)] for _ in range(2))
    for at in range(LANES, TOP, LANES):
        least, greatest = T.min(least, most[lanes(at)]), T.max(greatest, most[lanes(at)])
    T.buffer_store(both, reduce_max(greatest), [0])
    T.buffer_store(both, f32(0) - reduce_max(splat(f32(0)) - least), [1])
    if width % TOP:
        with T.serial(whole * TOP, width) as c:
            T.buffer_store(both, T.max(both[0], x[row, c]), [0])
    return both[0], both[1]


class _Best:
    """The greatest numbers offered so far, in order, and where they stand; `reached`: none below it need be kept."""

    def __init__(self, reached: Any) -> None:
        room = TOP + LANES  # a store of sixteen may begin at the last
        self.values, self.ids = registers((room,), "float32"), registers((room,), "int32")
        self.state, self.filled = registers((1,), "float32"), registers((1,), "int32")
        for at in range(0, room, LANES):
            T.buffer_store(self.values, splat(f32(_LOWEST)), [lanes(at)])
            T.buffer_store(self.ids, splat(i32(0)), [lanes(at)])
        T.buffer_store(self.state, reached, [0])
        T.buffer_store(self.filled, i32(0), [0])

    def least(self) -> Any:
        """What is below it is not among the best."""
        return self.state[0]

    def offer(self, value: Any, place: Any) -> None:
        """Keep a number if it is among the best; of equal ones those that came first are."""
        wanted = T.Or(self.filled[0] < TOP, value > self.values[TOP - 1])
        with T.If(T.And(value >= self.least(), wanted)), T.Then():
            self._insert(value, place)

    def _insert(self, value: Any, place: Any) -> None:
        above, at = registers((LANES,), "float32"), registers((1,), "int32")
        T.buffer_store(above, splat(f32(0)), [lanes(0)])
        for start in range(0, TOP, LANES):
            counted = T.Select(self.values[lanes(start)] >= splat(value), splat(f32(1)), splat(f32(0)))
            T.buffer_store(above, above[lanes(0)] + counted, [lanes(0)])
        T.buffer_store(at, T.min(T.cast(reduce_sum(above[lanes(0)]), "int32"), self.filled[0]), [0])
        for start in range(TOP - LANES, -1, -LANES):
            with T.If(at[0] + start < TOP), T.Then():
                for held in (self.values, self.ids):
                    T.buffer_store(held, held[lanes(at[0] + start)], [lanes(at[0] + start + 1)])
        T.buffer_store(self.values, value, [at[0]])
        T.buffer_store(self.ids, place, [at[0]])
        T.buffer_store(self.filled, T.min(self.filled[0] + 1, TOP), [0])
        T.buffer_store(self.state, T.max(self.state[0], self.values[TOP - 1]), [0])
