"""Positions on CUDA: the rotation of heads by a table of cosines and sines, and what else is made of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.elementwise import column_kernel
from llmc.targets.cuda.launch import f32, i32
from llmc.targets.cuda.target import CudaTarget


def _f64(value: float) -> Any:
    return tirx.const(value, "float64")


def _within_a_turn(angle: Any) -> Any:
    """A float64 angle, less whole turns, in float32."""
    turns = angle * _f64(1 / (2 * math.pi))
    return T.cast((turns - T.nearbyint(turns)) * _f64(2 * math.pi), "float32")


def rope_table(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """positions (M,), frequencies (R/2,) -> cosines and sines (M, R), times magnitude."""
    half, magnitude = int(shapes[1][0]), f32(attrs["magnitude"])

    def body(buffers: list[Any], row: Any, i: Any) -> None:
        positions, frequencies, out = buffers
        angle = _within_a_turn(T.cast(positions[row], "float64") * T.cast(frequencies[i], "float64"))
        T.buffer_store(out, T.cos(angle) * magnitude, [row, i])
        T.buffer_store(out, T.sin(angle) * magnitude, [row, half + i])

    return column_kernel(["int32", "float32", "float32"], shapes, body, half)


def rope(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, heads * D), table (M, R) -> x with R numbers, from `first` on, of each of its first heads rotated."""
    turn = Turn(int(attrs["head_dim"]), int(attrs["rotated_heads"]), int(attrs["first"]), str(attrs["layout"]))

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        x, table, out = buffers
        T.buffer_store(out, turn.of(x, table, row, column), [row, column])

    return column_kernel(["float32"] * 3, shapes, body)


@dataclass(frozen=True)
class Turn:
    """How rope turns numbers from `first` on of each of the first `heads` heads of `size`."""

    size: int
    heads: int
    first: int
    layout: str

    def of(self, x: Any, table: Any, row: Any, column: Any) -> Any:
        """A number of x (M, heads * D), turned by table (M, R)."""
        half, halves = int(table.shape[1]) // 2, {"half": True, "interleaved": False}[self.layout]
        place = T.floormod(column, self.size) - self.first
        inside = tirx.all(column < self.heads * self.size, place >= 0, place < 2 * half)
        second = place >= half if halves else T.floormod(place, 2) == 1
        angle = place - T.Select(second, half, 0) if halves else T.floordiv(place, 2)
        other = column + T.Select(second, -1, 1) * (half if halves else 1)
        # The second of a pair is b cos + a sin, the first a cos - b sin.
        turned = x[row, column] * table[row, angle] + (
            x[row, other] * table[row, half + angle] * T.Select(second, f32(1), f32(-1))
        )
        return T.if_then_else(inside, turned, x[row, column])


def sinusoid(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """positions (M,), frequencies (F,) -> sines, then cosines (M, 2F) of float32 angles of positions + offset."""
    count, offset = int(shapes[1][0]), i32(int(attrs["offset"]))

    def body(buffers: list[Any], row: Any, i: Any) -> None:
        positions, frequencies, out = buffers
        angle = _within_a_turn(T.cast(T.cast(positions[row] + offset, "float32") * frequencies[i], "float64"))
        T.buffer_store(out, T.sin(angle), [row, i])
        T.buffer_store(out, T.cos(angle), [row, count + i])

    return column_kernel(["int32", "float32", "float32"], shapes, body, count)


def grow_queries(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, W), positions (M,), factors (N,) -> (M, W), its first columns times the factor of a span of tokens."""
    columns, tokens, last = int(attrs["columns"]), int(attrs["tokens"]), int(shapes[2][0]) - 1

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        x, positions, factors, out = buffers
        factor = factors[T.min(T.floordiv(positions[row], tokens), last)]
        T.buffer_store(out, x[row, column] * T.if_then_else(column < columns, factor, f32(1)), [row, column])

    return column_kernel(["float32", "int32", "float32", "float32"], shapes, body)
