"""The greatest logits of a row on CUDA, best first, and the log of the sum of e^logit: what sampling starts from.

A block takes a row, a thread every so many-th column. In each round threads offer the best of their columns that is not
taken yet, the block agrees on the best of these, and its owner looks for its next one.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import (
    added,
    barrier,
    block_reduce,
    f32,
    greater,
    held,
    i32,
    local,
    row_kernel,
    shared,
    strided,
)  # fmt: skip
from llmc.targets.cuda.target import WARP, CudaTarget

THREADS = 512
WARPS = THREADS // WARP
_NOBODY = 2**31 - 1  # a column that is behind all


def _better(value: Any, column: Any, than: Any, other: Any) -> Any:
    """Whether a number comes before another: it is greater, or as great and of a lower column."""
    return tirx.any(value > than, tirx.all(value == than, column < other))


class _Best:
    """A number and its column, in registers, `count` of them."""

    def __init__(self, count: int = 1) -> None:
        self.value, self.column = local((count,)), local((count,), "int32")

    def set(self, value: Any, column: Any) -> None:
        T.buffer_store(self.value, value, [0])
        T.buffer_store(self.column, column, [0])

    def offer(self, value: Any, column: Any) -> None:
        """Take it if it comes before what is here."""
        offered = local((1,)), local((1,), "int32")
        T.buffer_store(offered[0], value, [0])
        T.buffer_store(offered[1], column, [0])
        better = _better(offered[0][0], offered[1][0], self.value[0], self.column[0])
        with T.If(better), T.Then():
            self.set(offered[0][0], offered[1][0])


def top(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> ids int32, values (M, K), log of the sum of e^x (M,). What is no number comes last."""
    width, count = int(shapes[0][1]), int(shapes[1][1])
    low = f32(float("-inf"))

    def body(buffers: list[Any], row: Any, thread: Any) -> None:
        x, ids, values, normalizers = buffers
        own, best = _Best(), _Best()
        winners = shared((WARPS,)), shared((WARPS,), "int32")

        def look(after: _Best | None) -> None:
            """The best of the thread's columns; of those that come after the one it had."""
            before = _Best()
            if after is not None:
                before.set(after.value[0], after.column[0])
            own.set(low, i32(_NOBODY))

            def consider(c: Any) -> None:
                number = local((1,))
                T.buffer_store(number, x[row, c], [0])
                T.buffer_store(number, T.Select(number[0] == number[0], number[0], low), [0])  # NaN is not itself
                if after is None:
                    own.offer(number[0], c)
                else:
                    with T.If(_better(before.value[0], before.column[0], number[0], c)), T.Then():
                        own.offer(number[0], c)

            strided(width, thread, THREADS, consider)

        look(None)
        most = local((1,))
        T.buffer_store(most, own.value[0], [0])
        block_reduce(most, 0, thread, THREADS, greater)
        total = local((1,))
        T.buffer_store(total, f32(0), [0])
        strided(width, thread, THREADS, lambda c: T.buffer_store(total, total[0] + T.exp(x[row, c] - most[0]), [0]))
        block_reduce(total, 0, thread, THREADS, added)
        with T.If(thread == 0), T.Then():
            T.buffer_store(normalizers, most[0] + T.log(total[0]), [row])
        with T.serial(0, count) as place:
            _agree(own, best, winners, thread)
            with T.If(thread == 0), T.Then():
                T.buffer_store(ids, best.column[0], [row, place])
                T.buffer_store(values, x[row, best.column[0]], [row, place])
            with T.If(own.column[0] == best.column[0]), T.Then():
                look(own)

    return row_kernel(["float32", "int32", "float32", "float32"], shapes, THREADS, body)


def argmax(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> the first index of the greatest value (M,). A row without any number gives 0."""
    width, low = int(shapes[0][1]), f32(float("-inf"))

    def body(buffers: list[Any], row: Any, thread: Any) -> None:
        x, out = buffers
        own, best = _Best(), _Best()
        own.set(low, i32(_NOBODY))

        def consider(c: Any) -> None:
            number = held(x[row, c])
            own.offer(T.Select(number == number, number, low), c)  # NaN is not itself

        strided(width, thread, THREADS, consider)
        _agree(own, best, (shared((WARPS,)), shared((WARPS,), "int32")), thread)
        with T.If(thread == 0), T.Then():
            T.buffer_store(out, best.column[0], [row])

    return row_kernel(["float32", "int32"], shapes, THREADS, body)


def _agree(own: _Best, best: _Best, winners: tuple[Any, Any], thread: Any) -> None:
    """`best` of all threads' own."""
    lanes = tirx.const(0xFFFFFFFF, "uint32")
    best.set(own.value[0], own.column[0])
    distance = WARP // 2
    while distance:
        value = T.tvm_warp_shuffle_xor(lanes, best.value[0], distance, WARP, WARP)
        column = T.tvm_warp_shuffle_xor(lanes, best.column[0], distance, WARP, WARP)
        best.offer(value, column)
        distance //= 2
    with T.If(T.floormod(thread, WARP) == 0), T.Then():
        T.buffer_store(winners[0], best.value[0], [T.floordiv(thread, WARP)])
        T.buffer_store(winners[1], best.column[0], [T.floordiv(thread, WARP)])
    barrier()
    best.set(winners[0][0], winners[1][0])
    with T.serial(1, WARPS) as warp:
        best.offer(winners[0][warp], winners[1][warp])
    barrier()  # before the next round writes winners
