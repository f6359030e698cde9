"""CUDA kernels that norm rows, a block each, or heads, a warp each: RMS and layer norm, of a row, of a sum of two."""

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
    held,
    lanes,
    launch,
    local,
    side_by_side,
    stored,
    width_threads,
)
from llmc.targets.cuda.target import WARP, CudaTarget

Read = Callable[[Any, Any], Any]  # a thread's turn, and its column then -> the number there
TOGETHER = 8  # columns of a thread, in rows that need no more threads than a block should have
MOST_THREADS = 512
HEADS = 4  # of a block, a warp each


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

    def read(self, buffer: Any, row: Any = None, first: Any = 0, to: Any = None) -> Any:
        """The thread's columns of a row, or a vector, from `first` on, in registers: all are on their way together."""
        own = local((self.turns,)) if to is None else to

        def load(turn: Any, column: Any) -> None:
            place = lanes(first + column, self.each)
            T.buffer_store(own, buffer[place] if row is None else buffer[row, place], [lanes(turn, self.each)])

        self.neighbours(load)
        return own

    def write(self, buffer: Any, row: Any, own: Any, rounded: bool = False, first: Any = 0) -> None:
        """Columns of a row, from `first` on, out of registers; `rounded`: to pairs of bfloat16."""
        count = self.each // (1 + rounded)
        pairs = local((count,), "int32") if rounded else None

        def store(turn: Any, column: Any) -> None:
            if pairs is None:
                T.buffer_store(buffer, own[lanes(turn, count)], [row, stored(first + column, count)])
                return
            for i in range(count):
                T.buffer_store(pairs, bf16_pair(own[turn + 2 * i], own[turn + 2 * i + 1]), [i])
            place = T.floordiv(column, self.each) * count
            T.buffer_store(buffer, pairs[lanes(0, count)], [row, stored(place, count)])

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


def _threads(width: int) -> int:
    """Of a block that has a row of so many columns."""
    return width_threads(-(-width // TOGETHER), MOST_THREADS)


def _norm(shapes: list[Any], attrs: dict[str, Any], centred: bool, summed: bool, rounded: bool) -> tirx.PrimFunc:
    """x [, residual], weight [, bias] -> [sum,] normed; `rounded`: the latter as bfloat16 pairs (M, C/2)."""
    rows, width = shapes[0]
    threads, each = _threads(int(width)), side_by_side(int(width))
    dtypes = ["float32"] * (2 + centred + 2 * summed) + ["int32" if rounded else "float32"]
    with IRBuilder() as builder, T.prim_func():
        x, *rest, out = arguments(dtypes, shapes)
        residual, total = (rest.pop(0), rest.pop()) if summed else (None, None)
        with launch({"blockIdx.x": rows, "threadIdx.x": threads}, waits=False) as (row, thread):
            columns = _Columns(int(width), thread, threads, each)
            weight, *bias = [columns.read(vector) for vector in rest]  # while the launch in front is still at work
            after_launches()
            own, other = columns.read(x, row), columns.read(residual, row) if summed else None
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
    heads, groups, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    with IRBuilder() as builder, T.prim_func():
        buffers = arguments(["float32"] * 4, shapes)
        if attrs["span"] == "all":
            threads = _threads(heads * size)
            with launch({"blockIdx.x": shapes[0][0], "blockIdx.y": 3, "threadIdx.x": threads}) as (row, part, thread):
                _norm_parts(buffers, attrs, row, part, thread)
        else:
            grid = {"blockIdx.x": shapes[0][0], "blockIdx.y": -(-(heads + 2 * groups) // HEADS)}
            with launch(grid | {"threadIdx.x": HEADS * WARP}, waits=False) as (row, block, thread):
                head = held(block * HEADS + T.floordiv(thread, WARP), "int32")
                _norm_head(buffers, attrs, row, head, thread % WARP)
    return builder.get()


def _norm_parts(buffers: list[Any], attrs: dict[str, Any], row: Any, part: Any, thread: Any) -> None:
    """A block has q, k or v of a row."""
    heads, groups, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    x, *weights, out = buffers
    first = 0
    for number, count in enumerate((heads * size, groups * size, groups * size)):
        with T.If(part == number), T.Then():
            columns = _Columns(count, thread, _threads(heads * size), side_by_side(size))
            own = columns.read(x, row, first=first)
            if number < 2:
                _weigh(columns, own, columns.read(weights[number]), attrs)
            columns.write(out, row, own, first=first)
        first += count


def _norm_head(buffers: list[Any], attrs: dict[str, Any], row: Any, head: Any, lane: Any) -> None:
    """A warp has a head of a row, if there is one of that number."""
    heads, groups, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    x, *weights, out = buffers
    columns = _Columns(size, lane, WARP, side_by_side(size))
    weight = local((columns.turns,))
    for count, vector, before in ((heads, weights[0], 0), (groups, weights[1], heads)):
        with T.If(tirx.all(head >= before, head < before + count)), T.Then():
            first = 0 if attrs["span"] == "head" else (head - before) * size
            columns.read(vector, first=first, to=weight)
    after_launches()
    with T.If(head < heads + 2 * groups), T.Then():
        own = columns.read(x, row, first=head * size)
        with T.If(head < heads + groups), T.Then():
            _weigh(columns, own, weight, attrs)
        columns.write(out, row, own, first=head * size)


def _weigh(columns: _Columns, own: Any, weight: Any, attrs: dict[str, Any]) -> None:
    """The thread's columns are normed, and multiplied by weights, where they are."""
    normed = _normed(lambda turn, _: own[turn], columns, attrs["eps"], attrs["kind"] == "layer")
    columns.run(lambda turn, c: T.buffer_store(own, normed(turn, c) * weight[turn], [turn]))
