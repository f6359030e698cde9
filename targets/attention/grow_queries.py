"""Queries multiplied by a number of their place in the text."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.rows.rows import columns, copy_columns, kernel
from llmc.targets.target import Target
from llmc.targets.vector import i32, lanes, registers, splat


def grow_queries(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, W), positions (M,), factors (N,) -> (M, W), the first `columns` numbers of a row times its factor."""
    grown, width, last = int(attrs["columns"]), int(shapes[0][1]), int(shapes[2][0]) - 1

    def body(buffers: list[Any], row: Any) -> None:
        qkv, positions, factors, out = buffers
        factor = registers((1,), "float32")
        span = T.min(T.floordiv(positions[row], i32(int(attrs["tokens"]))), i32(last))
        T.buffer_store(factor, factors[span], [0])
        columns(
            grown,
            lambda c: T.buffer_store(out, qkv[row, lanes(c)] * splat(factor[0]), [row, lanes(c)]),
            lambda c: T.buffer_store(out, qkv[row, c] * factor[0], [row, c]),
        )
        copy_columns(qkv, out, row, grown, width - grown)

    return kernel(["float32", "int32", "float32", "float32"], shapes, body)
