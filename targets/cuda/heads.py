"""CUDA kernels of latent attention: a matrix for each head, and the rows that attention reads."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.arguments import arguments
from llmc.targets.cuda.elementwise import column_kernel
from llmc.targets.cuda.launch import f32, fill, launch, local
from llmc.targets.cuda.products import LEFT, THREADS, WORKERS, Slices, matrix_dtype, multiply, parts_of, put, total
from llmc.targets.cuda.target import CudaTarget
from llmc.targets.cuda.weights import Weights

BLOCK_ROWS = (1, WORKERS)  # rows of x a block takes: of a step with one row, and of others


def head_linear(kind: str, target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, H S) float32 or bfloat16 pairs, packed weight (H N, K) -> (M, H N); N is a multiple of 16."""
    heads, columns = int(attrs["heads"]), int(attrs["columns"])
    step = int(shapes[0][1]) * (2 if kind == "bf16" else 1) // heads
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments([LEFT[kind], matrix_dtype(str(attrs["format"])), "float32"], shapes)
        left = Slices(kind, x, columns, step)
        alone, several = (partial(_launch, left, weight, out, attrs, rows) for rows in BLOCK_ROWS)
        with T.If(out.shape[0] == 1):
            with T.Then():
                alone()
            with T.Else():
                several()
    return builder.get()


def _launch(left: Slices, weight: Any, out: Any, attrs: dict[str, Any], group: int) -> None:
    """The products, `group` rows of x a block."""
    rows, width = out.shape[0], int(attrs["width"])
    tiles = width // int(attrs["heads"]) // TILE  # of one head
    grid = {"blockIdx.x": width // TILE, "blockIdx.y": T.floordiv(rows + group - 1, group), "threadIdx.x": THREADS}
    with launch(grid) as (tile, block, thread):
        weights = Weights(str(attrs["format"]), left.columns, thread, THREADS)
        sums, parts, own, slices = local((group,)), parts_of(group), *(local((group,), "int32") for _ in range(2))
        fill(sums, f32(0))
        fill(slices, T.cast(T.floordiv(tile, tiles), "int32"))
        for m in range(group):
            # A row beyond the last one computes the last one again, and is not written.
            T.buffer_store(own, T.cast(T.min(block * group + m, rows - 1), "int32"), [m])
        multiply(weights, weight, tile, thread, left, sums, own, slices)
        put(parts, thread, sums)
        row, column = T.floordiv(thread, TILE), T.floormod(thread, TILE)
        with T.If(tirx.all(row < group, block * group + row < rows)), T.Then():
            at = [block * group + row, tile * TILE + column]
            T.buffer_store(out, total(parts, row, column), at)


def latent_rows(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """q (M, H L), rotated (M, (H + 1) P), latent (M, L) -> (M, (H + 2) (L + P))."""
    heads, size = int(attrs["heads"]), int(shapes[2][1])
    turned = int(shapes[1][1]) // (heads + 1)

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        q, rotated, latent, out = buffers
        part, inside = T.floordiv(column, size + turned), T.floormod(column, size + turned)
        of_latent = T.if_then_else(part < heads, q[row, part * size + inside], latent[row, inside])
        of_turned = T.if_then_else(part <= heads, rotated[row, part * turned + inside - size], f32(0))
        T.buffer_store(out, T.if_then_else(inside < size, of_latent, of_turned), [row, column])

    return column_kernel(["float32"] * 4, shapes, body)


KERNELS: dict[str, Any] = {
    **{f"{kind}_head_linear": partial(head_linear, kind) for kind in LEFT},
    "latent_rows": latent_rows,
}
