"""Linear layers on CUDA: weights of any format dequantized in registers, products summed in float32.

A block takes a tile of 16 outputs and a few rows of x. Its threads are 16 outputs wide; each 16 of them, a worker, take
every so many-th unit of columns, and what workers summed is added in their order: a row's bits do not depend on how
many rows there are, though each weight is read once for all rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import barrier, f32, fill, from_bf16, launch, local, shared
from llmc.targets.cuda.target import CudaTarget
from llmc.targets.cuda.weights import Weights, u32

THREADS = 128
WORKERS = THREADS // TILE
BLOCK_ROWS = (1, 8)  # rows of x a block takes: of a step with one row, and of others

# x, row, first column, whether all columns that are asked for are x's -> the numbers of four columns, or zeros
Read = Callable[[Any, Any, Any, bool], list[Any]]


def _launch(
    x: Callable[..., list[Any]], weight: Any, out: Any, attrs: dict[str, Any], columns: int, group: int
) -> None:
    """The product, `group` rows of x a block."""
    rows, width = out.shape[0], int(attrs["width"])
    grid = {
        "blockIdx.x": -(-width // TILE),
        "blockIdx.y": T.floordiv(rows + group - 1, group),
        "threadIdx.x": THREADS,
    }
    with launch(grid) as (tile, block, thread):
        weights = Weights(str(attrs["format"]), columns, thread, THREADS)
        whole = weights.units * weights.unit == columns
        row, worker = T.floormod(thread, TILE), T.floordiv(thread, TILE)
        sums = local((group,))
        fill(sums, f32(0))
        with T.serial(0, -(-weights.units // WORKERS)) as step:
            unit = step * WORKERS + worker
            with T.If(unit < weights.units), T.Then():
                for first, numbers in weights.read(weight, tile, row, unit):
                    held = local((4,))
                    for i, number in enumerate(numbers):
                        T.buffer_store(held, number, [i])
                    for m in range(group):
                        # A row beyond the last one computes the last one again, and is not written.
                        own = block if group == 1 else T.min(block * group + m, rows - 1)
                        four = x(own, unit * weights.unit + first, whole)
                        for i in range(4):
                            T.buffer_store(sums, sums[m] + held[i] * four[i], [m])
        _gather(sums, out, tile, block, thread, group, width)


def _gather(sums: Any, out: Any, tile: Any, block: Any, thread: Any, group: int, width: int) -> None:
    """What workers summed for rows of x, added in their order and written."""
    parts = shared((group, WORKERS, TILE))
    row, worker = T.floormod(thread, TILE), T.floordiv(thread, TILE)
    for m in range(group):
        T.buffer_store(parts, sums[m], [m, worker, row])
    barrier()
    total = local((1,))
    own, column = block * group + worker, tile * TILE + row
    with T.If(tirx.all(worker < group, own < out.shape[0], column < width)), T.Then():
        T.buffer_store(total, f32(0), [0])
        for other in range(WORKERS):
            T.buffer_store(total, total[0] + parts[worker, other, row], [0])
        T.buffer_store(out, total[0], [own, column])


def _linear(shapes: list[Any], attrs: dict[str, Any], dtype: str, columns: int, read: Read) -> tirx.PrimFunc:
    """x, weight -> (M, N), of so many columns a row of x, which `read` reads."""
    assert BLOCK_ROWS[-1] <= WORKERS
    matrix = {"f32": "float32"}.get(str(attrs["format"]), "int32")
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments([dtype, matrix, "float32"], shapes)
        alone, several = BLOCK_ROWS
        with T.If(out.shape[0] == alone):
            with T.Then():
                _launch(partial(read, x), weight, out, attrs, columns, alone)
            with T.Else():
                _launch(partial(read, x), weight, out, attrs, columns, several)
    return builder.get()


def packed_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K), packed (N = width, K) -> (M, N)."""
    columns, four = int(shapes[0][1]), T.ramp(0, 1, 4)

    def read(x: Any, row: Any, first: Any, whole: bool) -> list[Any]:
        if columns % 4:
            return [T.if_then_else(c < columns, x[row, c], f32(0)) for c in (first + i for i in range(4))]
        held = local((4,))
        if whole:
            T.buffer_store(held, x[row, T.ramp(first, 1, 4)], [four])
        else:
            with T.If(first < columns):
                with T.Then():
                    T.buffer_store(held, x[row, T.ramp(first, 1, 4)], [four])
                with T.Else():
                    T.buffer_store(held, T.broadcast(f32(0), 4), [four])
        return [held[i] for i in range(4)]

    return _linear(shapes, attrs, "float32", columns, read)


def bf16_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """bfloat16 pairs x (M, K/2), packed (N = width, K) -> (M, N)."""
    pairs = int(shapes[0][1])

    def read(x: Any, row: Any, first: Any, whole: bool) -> list[Any]:
        numbers = []
        for pair in (T.floordiv(first, 2), T.floordiv(first, 2) + 1):
            word = x[row, pair] if whole else T.if_then_else(pair < pairs, x[row, pair], 0)
            held = local((1,), "uint32")
            T.buffer_store(held, T.reinterpret("uint32", word), [0])
            numbers += [from_bf16(held[0] & u32(0xFFFF)), T.reinterpret("float32", held[0] & u32(0xFFFF0000))]
        return numbers

    return _linear(shapes, attrs, "int32", 2 * pairs, read)
