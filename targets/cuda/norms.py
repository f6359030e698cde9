"""CUDA kernels that norm rows, a block each: RMS and layer norm, of a row, of a sum of two, of heads of q and k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import (
    added,
    after_launches,
    bf16_pair,
    block_reduce,
    f32,
    lanes,
    launch,
    local,
    side_by_side,
    strided,
    width_threads,
)
from llmc.targets.cuda.target import CudaTarget

Read = Callable[[Any, Any], Any]  # a thread's turn, and its column then -> the number there
TOGETHER = 8  # columns of a thread, in rows that need no more threads than a block should have
MOST_THREADS = 512


@dataclass(frozen=True)
class _Columns:
    """The columns of a row, of which threads of a block take `each` neighbours in turn."""

    width: int
    thread: Any
    threads: int
    each: int = 1

    @property
    def turns(self) -> int:
        """The most columns of a thread."""
        return self.each * -(-self.width // (self.each * self.threads))

    def neighbours(self, body: Callable[[Any, Any], None]) -> None:
        """`body(turn, column)` of the first of each that a thread takes together."""
        count = self.width // self.each
        with T.unroll(0, self.turns // self.each) as step:
            place = step * self.threads + self.thread
            if count % self.threads:
                with T.If(place < count), T.Then():
                    body(step * self.each, place * self.each)
            else:
                body(step * self.each, place * self.each)

    def run(self, body: Callable[[Any, Any], None]) -> None:
        """`body(turn, column)` for every column."""

        def each(turn: Any, column: Any) -> None:
            for e in range(self.each):
                body(turn + e, column + e)

        self.neighbours(each)

    def read(self, buffer: Any, row: Any = None) -> Any:
        """The thread's columns of a row, or of a vector, in registers: all are on their way together."""
        own = local((self.turns,))

        def load(turn: Any, column: Any) -> None:
            place = lanes(column, self.each)
            T.buffer_store(own, buffer[place] if row is None else buffer[row, place], [lanes(turn, self.each)])

        self.neighbours(load)
        return own

    def write(self, buffer: Any, row: Any, own: Any, rounded: bool = False) -> None:
        """Columns of a row out of registers; `rounded`: to pairs of bfloat16."""
        count = self.each // (1 + rounded)
        pairs = local((count,), "int32") if rounded else None

        def store(turn: Any, column: Any) -> None:
            if pairs is None:
                T.buffer_store(buffer, own[lanes(turn, count)], [row, lanes(column, count)])
                return
            for i in range(count):
                T.buffer_store(pairs, bf16_pair(own[turn + 2 * i], own[turn + 2 * i + 1]), [i])
            place = T.floordiv(column, self.each) * count
            T.buffer_store(buffer, pairs[lanes(0, count)], [row, lanes(place, count)])

        self.neighbours(store)


def _mean(columns: _Columns, number: Read) -> Any:
    """The mean over columns, in a register of every thread of the block."""
    total = local((1,))
    T.buffer_store(total, f32(0), [0])
    columns.run(lambda turn, c: T.buffer_store(total, total[0] + number(turn, c), [0]))
    block_reduce(total, 0, columns.thread, columns.threads, added)
    T.buffer_store(total, total[0] / f32(columns.width), [0])
    return total[0]


def _normed(number: Read, columns: _Columns, eps: float, centred: bool) -> Read:
    """The column's number / sqrt(mean of squares + eps); `centred`: their mean is taken off them first."""
    mean = _mean(columns, number) if centred else None

    def centre(turn: Any, c: Any) -> Any:
        return number(turn, c) if mean is None else number(turn, c) - mean

    squares = _mean(columns, lambda turn, c: centre(turn, c) * centre(turn, c))
    scale = local((1,))
    T.buffer_store(scale, f32(1) / T.sqrt(squares + f32(eps)), [0])
    return lambda turn, c: centre(turn, c) * scale[0]


def _norm(shapes: list[Any], attrs: dict[str, Any], centred: bool, summed: bool, rounded: bool) -> tirx.PrimFunc:
    """x [, residual], weight [, bias] -> [sum,] normed; `rounded`: the latter as bfloat16 pairs (M, C/2)."""
    rows, width = shapes[0]
    threads, each = width_threads(-(-int(width) // TOGETHER), MOST_THREADS), side_by_side(int(width))
    dtypes = ["float32"] * (2 + centred + 2 * summed) + ["int32" if rounded else "float32"]
    with IRBuilder() as builder, T.prim_func():
        x, *rest, out = arguments(dtypes, shapes)
        residual, total = (rest.pop(0), rest.pop()) if summed else (None, None)
        with launch({"blockIdx.x": rows, "threadIdx.x": threads}, waits=False) as (row, thread):
            columns = _Columns(int(width), thread, threads, each)
            weight, *bias = [columns.read(vector) for vector in rest]  # while the launch in front is still at work
            after_launches()
            own, other = columns.read(x, row), None if residual is None else columns.read(residual, row)
            if other is not None:
                columns.run(lambda turn, _: T.buffer_store(own, own[turn] + other[turn], [turn]))
                columns.write(total, row, own)
            normed = _normed(lambda turn, _: own[turn], columns, attrs["eps"], centred)

            def number(turn: Any, c: Any) -> None:
                value = normed(turn, c) * weight[turn]
                T.buffer_store(own, value + bias[0][turn] if bias else value, [turn])

            columns.run(number)
            columns.write(out, row, own, rounded)
    return builder.get()


def rms_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], rounded: bool = False) -> tirx.PrimFunc:
    """x (M, C), weight (C,) -> (M, C)."""
    return _norm(shapes, attrs, centred=False, summed=False, rounded=rounded)


def add_rms_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], rounded: bool = False) -> tirx.PrimFunc:
    """x, residual (M, C), weight (C,) -> sum, normed (M, C)."""
    return _norm(shapes, attrs, centred=False, summed=True, rounded=rounded)


def layer_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], rounded: bool = False) -> tirx.PrimFunc:
    """x (M, C), weight, bias (C,) -> (M, C)."""
    return _norm(shapes, attrs, centred=True, summed=False, rounded=rounded)


def add_layer_norm(
    target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], rounded: bool = False
) -> tirx.PrimFunc:
    """x, residual (M, C), weight, bias (C,) -> sum, normed (M, C)."""
    return _norm(shapes, attrs, centred=True, summed=True, rounded=rounded)


def qk_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), weights of q and of k -> the same, q and k normed; by heads, or as one row each."""
    heads, kv_heads, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    width, whole, shared = int(shapes[0][1]), attrs["span"] == "all", attrs["span"] == "head"
    centred, eps = attrs["kind"] == "layer", attrs["eps"]

    def norm(buffers: list[Any], weight: Any, row: Any, thread: Any, threads: int, span: tuple[Any, int, Any]) -> None:
        """The `count` columns from `first` on, by weights from `at` on."""
        (x, *_, out), (first, count, at) = buffers, span
        columns = _Columns(count, thread, threads)
        normed = _normed(lambda turn, c: x[row, first + c], columns, eps, centred)

        def store(turn: Any, c: Any) -> None:
            T.buffer_store(out, normed(turn, c) * weight[at + c], [row, first + c])

        columns.run(store)

    with IRBuilder() as builder, T.prim_func():
        buffers = arguments(["float32"] * 4, shapes)
        rows, start = shapes[0][0], 0
        for weight, count in ((buffers[1], heads), (buffers[2], kv_heads)):
            spans, each = (1, count * size) if whole else (count, size)
            threads = width_threads(each)
            with launch({"blockIdx.x": rows, "blockIdx.y": spans, "threadIdx.x": threads}) as (row, span, thread):
                at = 0 if shared else span * each
                norm(buffers, weight, row, thread, threads, (start + span * each, each, at))
            start += count * size
        threads = width_threads(width - start)
        with launch({"blockIdx.x": rows, "threadIdx.x": threads}) as (row, thread):
            strided(
                width - start, thread, threads,
                lambda c: T.buffer_store(buffers[3], buffers[0][row, start + c], [row, start + c]),
            )  # fmt: skip
    return builder.get()
