"""Rotary position embedding: the table of a step's cosines and sines, and the rotation of heads by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.rows.rows import columns, copy_columns, kernel
from llmc.targets.target import Target
from llmc.targets.vector import LANES, f32, lanes


def rope_table(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """positions (M,), frequencies (R/2,) -> cosines and sines (M, R), times magnitude."""
    half, magnitude = int(shapes[1][0]), f32(attrs["magnitude"])

    def body(buffers: list[Any], row: Any) -> None:
        positions, frequencies, out = buffers
        with T.serial(0, half) as i:
            turns = T.cast(positions[row], "float64") * T.cast(frequencies[i], "float64") * _f64(1 / (2 * math.pi))
            angle = T.cast((turns - T.nearbyint(turns)) * _f64(2 * math.pi), "float32")
            T.buffer_store(out, T.cos(angle) * magnitude, [row, i])
            T.buffer_store(out, T.sin(angle) * magnitude, [row, half + i])

    return kernel(["int32", "float32", "float32"], shapes, body)


def _f64(value: float) -> Any:
    return tirx.const(value, "float64")


def rope(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, heads * D), table (M, R) -> x with R numbers, from `first` on, of each of its first heads rotated."""
    size, rotated, start = int(attrs["head_dim"]), int(attrs["rotated_heads"]), int(attrs["first"])
    half, width = int(shapes[1][1]) // 2, int(shapes[0][1])
    stride = {"half": 1, "interleaved": 2}[attrs["layout"]]

    def pair(i: Any) -> tuple[Any, Any]:
        """The two columns of pair i inside a head."""
        return start + i * stride, start + i * stride + (half if stride == 1 else 1)

    def body(buffers: list[Any], row: Any) -> None:
        x, table, out = buffers
        with T.serial(0, rotated) as head:

            def rotate(pick: Callable[[Any], tuple[Any, Any]], index: Any, at: Any) -> None:
                first, second = pick(index)
                a, b = x[row, head * size + first], x[row, head * size + second]
                cos, sin = table[row, at], table[row, half + at]
                T.buffer_store(out, a * cos - b * sin, [row, head * size + first])
                T.buffer_store(out, b * cos + a * sin, [row, head * size + second])

            def sixteen(i: Any) -> tuple[Any, Any]:
                first, second = pair(i)
                return T.ramp(first, stride, LANES), T.ramp(second, stride, LANES)

            columns(half, lambda i: rotate(sixteen, i, lanes(i)), lambda i: rotate(pair, i, i))
            copy_columns(x, out, row, head * size, start)
            copy_columns(x, out, row, head * size + start + 2 * half, size - start - 2 * half)
        copy_columns(x, out, row, rotated * size, width - rotated * size)

    return kernel(["float32"] * 3, shapes, body)
