"""Look-up of rows in a packed table on CUDA: a block a token, a thread a unit of columns."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.cuda.launch import f32, row_kernel
from llmc.targets.cuda.target import CudaTarget
from llmc.targets.cuda.weights import Weights

THREADS = 64


def packed_embedding(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """ids (M,), packed (V, C = width) -> (M, C), zeros for an id below 0."""
    width, matrix = int(attrs["width"]), {"f32": "float32"}.get(str(attrs["format"]), "int32")

    def body(buffers: list[Any], token: Any, thread: Any) -> None:
        ids, table, out = buffers
        weights = Weights(str(attrs["format"]), width, thread, THREADS)
        known = T.max(ids[token], 0)
        with T.serial(0, -(-weights.units // THREADS)) as step:
            unit = step * THREADS + thread
            with T.If(unit < weights.units), T.Then():
                for first, numbers in weights.read(table, T.floordiv(known, TILE), T.floormod(known, TILE), unit):
                    for i, number in enumerate(numbers):
                        column = unit * weights.unit + first + i
                        with T.If(column < width), T.Then():
                            T.buffer_store(out, T.Select(ids[token] < 0, f32(0), number), [token, column])

    return row_kernel(["int32", matrix, "float32"], shapes, THREADS, body)
