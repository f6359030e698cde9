"""Products of some rows with 16 rows of a packed matrix, by the threads of a block, as linear.py divides them.

Threads are 16 outputs wide; each 16 of them, a worker, take every so many-th unit of columns, and what workers summed
is added in their order. A product's bits do not depend on how many rows there are beside it.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.cuda.launch import barrier, f32, from_bf16, i32, local, shared, u32
from llmc.targets.cuda.weights import Weights

THREADS = 128
WORKERS = THREADS // TILE
LEFT = {"packed": "float32", "bf16": "int32"}  # kinds of left sides -> the dtype of x


def matrix_dtype(format: str) -> str:
    """Of a packed matrix."""
    return "float32" if format == "f32" else "int32"


class Slices:
    """The left side: slices of rows of x, float32 or bfloat16 pairs; slice i begins at column i * `step`.

    Widths of slices are multiples of 4. A slice is told by its number: TVM sees that its columns are aligned, or not.
    """

    def __init__(self, kind: str, x: Any, columns: int, step: int) -> None:
        self.pairs, self.x, self.columns, self.step = kind == "bf16", x, columns, step
        self.aligned = step % 4 == 0 and int(x.shape[1]) % (2 if self.pairs else 4) == 0
        assert columns % 4 == 0

    def four(self, row: Any, slice: Any, first: Any, whole: bool) -> list[Any]:
        """Four columns from `first` on of a slice of a row.

        Unless all that are asked for are in the slice (`whole`), zeros beyond it.
        """
        width, dtype = (2, "int32") if self.pairs else (4, "float32")
        held, lanes = local((width,), dtype), T.ramp(0, 1, width)
        halves = 2 if self.pairs else 1
        at = slice * (self.step // halves) + T.floordiv(first, halves)

        def load() -> None:
            if self.aligned:
                T.buffer_store(held, self.x[row, T.ramp(at, 1, width)], [lanes])
                return
            for i in range(width):
                T.buffer_store(held, self.x[row, at + i], [i])

        if whole:
            load()
        else:
            with T.If(first < self.columns):
                with T.Then():
                    load()
                with T.Else():
                    T.buffer_store(held, T.broadcast(i32(0) if self.pairs else f32(0), width), [lanes])
        if not self.pairs:
            return [held[i] for i in range(4)]
        words = [T.reinterpret("uint32", held[i]) for i in range(2)]
        return [
            number
            for word in words
            for number in (from_bf16(word & u32(0xFFFF)), T.reinterpret("float32", word & u32(0xFFFF0000)))
        ]


def multiply(
    weights: Weights, matrix: Any, tile: Any, thread: Any, left: Slices, sums: Any, rows: Any, slices: Any
) -> None:
    """sums[m] += the thread's part of the product of its output with slice slices[m] of row rows[m]."""
    whole = weights.units * weights.unit == weights.columns
    row, worker = T.floormod(thread, TILE), T.floordiv(thread, TILE)
    with T.serial(0, -(-weights.units // WORKERS)) as step:
        unit = step * WORKERS + worker
        with T.If(unit < weights.units), T.Then():
            for first, numbers in weights.read(matrix, tile, row, unit):
                held = local((4,))
                for i, number in enumerate(numbers):
                    T.buffer_store(held, number, [i])
                for m in range(int(sums.shape[0])):
                    four = left.four(rows[m], slices[m], unit * weights.unit + first, whole)
                    for i in range(4):
                        T.buffer_store(sums, sums[m] + held[i] * four[i], [m])


def parts_of(count: int) -> Any:
    """Where workers put their sums for so many products: (count, workers, 16)."""
    return shared((count, WORKERS, TILE))


def put(parts: Any, thread: Any, sums: Any) -> None:
    """The thread's sums into parts, for all to read behind the barrier that follows."""
    for m in range(int(sums.shape[0])):
        T.buffer_store(parts, sums[m], [m, T.floordiv(thread, TILE), T.floormod(thread, TILE)])
    barrier()


def total(parts: Any, product: Any, row: Any) -> Any:
    """What workers put for output `row` of a product, added in their order."""
    one = local((1,))
    T.buffer_store(one, f32(0), [0])
    for worker in range(WORKERS):
        T.buffer_store(one, one[0] + parts[product, worker, row], [0])
    return one[0]
