"""Look-up of rows in a packed table on CUDA: a block a token, a thread a unit of columns."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.cuda.launch import f32, lanes, local, row_kernel, side_by_side, stored
from llmc.targets.cuda.target import CudaTarget
from llmc.targets.cuda.weights import Weights

THREADS = 128


def packed_embedding(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """ids (M,), packed (V, C = width) -> (M, C), zeros for an id below 0."""
    width, matrix = int(attrs["width"]), {"f32": "float32"}.get(str(attrs["format"]), "int32")

    def body(buffers: list[Any], token: Any, thread: Any) -> None:
        ids, table, out = buffers
        weights = Weights(str(attrs["format"]), width, thread, THREADS)
        known, there, together = T.max(ids[token], 0), ids[token] >= 0, side_by_side(width)
        with T.serial(0, -(-weights.units // THREADS)) as step:
            unit = step * THREADS + thread
            with T.If(unit < weights.units), T.Then():
                for first, numbers in weights.read(table, T.floordiv(known, TILE), T.floormod(known, TILE), unit):
                    four = local((len(numbers),))
                    for i, number in enumerate(numbers):
                        T.buffer_store(four, T.Select(there, number, f32(0)), [i])
                    for i in range(0, len(numbers), together):
                        column = unit * weights.unit + first + i
                        with T.If(column < width), T.Then():
                            T.buffer_store(out, four[lanes(i, together)], [token, stored(column, together)])

    return row_kernel(["int32", matrix, "float32"], shapes, THREADS, body)
