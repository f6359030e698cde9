"""Kernels that add the biases of the experts that a row goes through."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.rows.rows import columns, copy_columns, kernel
from llmc.targets.target import Target
from llmc.targets.vector import f32, fma, lanes, splat


def experts_bias(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, U F), ids (M, U), bias (E F,) -> x, to each slice of which its expert's bias is added."""
    used = int(shapes[1][1])
    width = int(shapes[0][1]) // used

    def body(buffers: list[Any], row: Any) -> None:
        x, ids, bias, out = buffers
        copy_columns(x, out, row, 0, used * width)
        with T.serial(0, used) as u, T.If(ids[row, u] >= 0), T.Then():
            _add(x, out, row, u * width, width, bias, ids[row, u] * width, None)

    return kernel(["float32", "int32", "float32", "float32"], shapes, body)


def experts_out_bias(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), ids, weights (M, U), bias (E C,) -> x + the sum of weight * bias of the row's experts (M, C)."""
    width, used = int(shapes[0][1]), int(shapes[1][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, ids, weights, bias, out = buffers
        copy_columns(x, out, row, 0, width)
        with T.serial(0, used) as u, T.If(ids[row, u] >= 0), T.Then():
            _add(out, out, row, 0, width, bias, ids[row, u] * width, weights[row, u])

    return kernel(["float32", "int32", "float32", "float32", "float32"], shapes, body)


def _add(x: Any, out: Any, row: Any, first: Any, width: int, bias: Any, start: Any, weight: Any) -> None:
    """out = x + weight * bias of `width` columns from `first` on; `start` is the bias' place. No weight is 1."""
    by = f32(1) if weight is None else weight
    columns(
        width,
        lambda c: T.buffer_store(
            out, fma(splat(by), bias[lanes(start + c)], x[row, lanes(first + c)]), [row, lanes(first + c)]
        ),
        lambda c: T.buffer_store(out, x[row, first + c] + by * bias[start + c], [row, first + c]),
    )
