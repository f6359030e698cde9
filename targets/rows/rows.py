"""Kernels that go row by row: their frame, and those that only move rows or search them.

Each works on one row at a time, in parallel over rows when there are enough of them to pay for a fork.
Column counts that are not a multiple of 16 finish with a scalar loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.arguments import arguments
from llmc.targets.target import Target
from llmc.targets.vector import LANES, f32, i32, lanes, reduce_max, registers, splat

PARALLEL_ROWS = 16  # fewer rows than this run on one thread: a fork costs about 2 us

Body = Callable[[list[Any], Any], None]


def kernel(
    dtypes: list[str], shapes: list[Any], body: Body, count: int = 0, parallel_rows: int = PARALLEL_ROWS
) -> tirx.PrimFunc:
    """A PrimFunc over buffers of these shapes that runs `body(buffers, row)` for each row of buffer `count`."""
    with IRBuilder() as builder, T.prim_func():
        buffers = arguments(dtypes, shapes)
        rows = shapes[count][0]
        with T.If(rows < parallel_rows):
            with T.Then(), T.serial(0, rows) as row:
                body(buffers, row)
            with T.Else(), T.parallel(0, rows) as row:
                body(buffers, row)
    return builder.get()


def columns(width: int, vector: Callable[[Any], None], scalar: Callable[[Any], None]) -> None:
    """`vector(first column)` for each sixteen columns, then `scalar(column)` for the rest."""
    whole = width // LANES
    if whole:
        with T.serial(0, whole) as step:
            vector(step * LANES)
    if width % LANES:
        with T.serial(0, width % LANES) as rest:
            scalar(whole * LANES + rest)


def splat_store(buffer: Any, value: Any) -> None:
    """The first sixteen numbers of a register array."""
    T.buffer_store(buffer, value, [lanes(0)])


def copy_columns(x: Any, out: Any, row: Any, first: Any, count: int, to: Any = None) -> None:
    """`count` columns of a row from `first` on, as they are, into those from `to` on; None: into the same."""
    to = first if to is None else to
    columns(
        count,
        lambda c: T.buffer_store(out, x[row, lanes(first + c)], [row, lanes(to + c)]),
        lambda c: T.buffer_store(out, x[row, first + c], [row, to + c]),
    )


def take_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), rows (R,) -> (R, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, rows, out = buffers
        columns(
            width,
            lambda c: T.buffer_store(out, x[rows[row], lanes(c)], [row, lanes(c)]),
            lambda c: T.buffer_store(out, x[rows[row], c], [row, c]),
        )

    return kernel(["float32", "int32", "float32"], shapes, body, count=1)


def take_columns(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> (M, count): columns from `first` on."""

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        copy_columns(x, out, row, int(attrs["first"]), int(attrs["count"]), to=0)

    return kernel(["float32", "float32"], shapes, body)


def own_ids(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """ids (M,) or (M, U) -> those less `first`, -1 where that is not within 0..count - 1."""
    first, count = int(attrs["first"]), int(attrs["count"])

    def body(buffers: list[Any], row: Any) -> None:
        ids, out = buffers

        def one(place: list[Any]) -> None:
            own = ids[tuple(place)] - first
            T.buffer_store(out, T.Select(T.And(own >= 0, own < count), own, i32(-1)), place)

        if len(shapes[0]) == 1:
            one([row])
        else:
            with T.serial(0, int(shapes[0][1])) as column:
                one([row, column])

    return kernel(["int32", "int32"], shapes, body)


def argmax(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> the first index of the greatest value (M,).

    Two passes: the greatest value by vectors, then the first place it stands. A row without any number gives 0.
    """
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        best, tail, place = registers((LANES,), "float32"), registers((1,), "float32"), registers((1,), "int32")
        lowest = f32(float("-inf"))
        splat_store(best, splat(lowest))
        T.buffer_store(tail, lowest, [0])
        columns(
            width,
            lambda c: splat_store(best, T.max(best[lanes(0)], x[row, lanes(c)])),
            lambda c: T.buffer_store(tail, T.max(tail[0], x[row, c]), [0]),
        )
        T.buffer_store(tail, T.max(reduce_max(best[lanes(0)]), tail[0]), [0])
        T.buffer_store(place, i32(0), [0])
        with T.While(T.And(place[0] < width, x[row, place[0]] != tail[0])):
            T.buffer_store(place, place[0] + 1, [0])
        T.buffer_store(out, T.Select(place[0] < width, place[0], i32(0)), [row])

    return kernel(["float32", "int32"], shapes, body)


def concat(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """(M, A), (M, B), ... -> (M, A + B + ...): columns side by side."""

    def body(buffers: list[Any], row: Any) -> None:
        *parts, out = buffers
        start = 0
        for part, shape in zip(parts, shapes, strict=False):
            with T.serial(0, int(shape[1])) as column:
                T.buffer_store(out, part[row, column], [row, start + column])
            start += int(shape[1])

    return kernel(["float32"] * len(shapes), shapes, body)
