"""Rows rotated on CUDA (compiler/formats/activations.py): what stands before products with rotated formats.

A thread has four neighbouring columns, and the lanes that have 64 together exchange them. Sums are made in the order of
the NumPy meaning, and nothing in them can be fused: the bits are the same.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import ROTATED, ceil_to
from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import (
    f32,
    fill,
    held,
    lanes,
    launch,
    local,
    shuffled,
    side_by_side,
    stored,
    width_threads,
)
from llmc.targets.cuda.target import CudaTarget

THREADS = 128
EACH = 4  # columns of a thread


def rotate_rows(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) -> (M, width): every 64 columns rotated, zeros added to whole ones, and of all the first `width`."""
    known, width = int(shapes[0][1]), int(attrs["width"])
    groups = ceil_to(width, ROTATED) // EACH
    threads = width_threads(groups, THREADS)
    with IRBuilder() as builder, T.prim_func():
        x, out = arguments(["float32"] * 2, shapes)
        grid = {"blockIdx.x": shapes[0][0], "blockIdx.y": -(-groups // threads), "threadIdx.x": threads}
        with launch(grid) as (row, block, thread):  # no thread leaves: all lanes of a warp exchange
            first, four = (block * threads + thread) * EACH, local((EACH,))
            fill(four, f32(0))
            count = side_by_side(known, EACH)
            for i in range(0, EACH, count):
                with T.If(first + i < known), T.Then():
                    T.buffer_store(four, x[row, lanes(first + i, count)], [lanes(i, count)])
            _rotate(four, thread)
            count = side_by_side(width, EACH)
            for i in range(0, EACH, count):
                with T.If(first + i < width), T.Then():
                    T.buffer_store(out, four[lanes(i, count)], [row, stored(first + i, count)])
    return builder.get()


def _rotate(four: Any, thread: Any) -> None:
    """The columns of the lanes that have 64, in place: a and b become a + b and a - b, at last all by a factor."""
    distance = 1
    while distance < EACH:
        for i in range(EACH):
            if i & distance == 0:
                a, b = held(four[i]), held(four[i + distance])
                T.buffer_store(four, a + b, [i])
                T.buffer_store(four, a - b, [i + distance])
        distance *= 2
    while distance < ROTATED:
        apart = distance // EACH
        is_second = T.floormod(T.floordiv(thread, apart), 2) == 1
        for i in range(EACH):
            other = shuffled(four[i], apart, "float32")
            T.buffer_store(four, T.Select(is_second, other - four[i], four[i] + other), [i])
        distance *= 2
    for i in range(EACH):
        T.buffer_store(four, four[i] * f32(ROTATED**-0.5), [i])
