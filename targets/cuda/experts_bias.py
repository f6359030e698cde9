"""CUDA kernels that add the biases of the experts that a row goes through, one thread a number."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.elementwise import column_kernel
from llmc.targets.cuda.launch import local
from llmc.targets.cuda.target import CudaTarget


def experts_bias(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, U F), ids (M, U), bias (E F,) -> x, to each slice of which its expert's bias is added."""
    width = int(shapes[0][1]) // int(shapes[1][1])

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        x, ids, bias, out = buffers
        own = local((1,))
        T.buffer_store(own, x[row, column], [0])
        expert = ids[row, T.floordiv(column, width)]
        with T.If(expert >= 0), T.Then():
            T.buffer_store(own, own[0] + bias[expert * width + T.floormod(column, width)], [0])
        T.buffer_store(out, own[0], [row, column])

    return column_kernel(["float32", "int32", "float32", "float32"], shapes, body)


def experts_out_bias(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), ids, weights (M, U), bias (E C,) -> x + the sum of weight * bias of the row's experts (M, C)."""
    width, used = int(shapes[0][1]), int(shapes[1][1])

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        x, ids, weights, bias, out = buffers
        own = local((1,))
        T.buffer_store(own, x[row, column], [0])
        with T.serial(0, used) as u, T.If(ids[row, u] >= 0), T.Then():
            T.buffer_store(own, own[0] + weights[row, u] * bias[ids[row, u] * width + column], [0])
        T.buffer_store(out, own[0], [row, column])

    return column_kernel(["float32", "int32", "float32", "float32", "float32"], shapes, body)
