"""Matrices of experts: a row is multiplied with those that it was routed to, by the reductions of linear layers.

A thread owns a range of tiles, the same of every expert, and takes all rows through them: what the experts have there
stays in its cache while rows come, so that a step reads each matrix from memory once however many rows it has.
Each row is summed by itself, in the same order whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, FORMATS, SUM_BLOCK, TILE, BlockFormat
from llmc.targets.block_linear import i8_body, packed_body
from llmc.targets.linear import Reduce, bf16_body, f32_body, get, put, zeros
from llmc.targets.target import Target
from llmc.targets.vector import fma, lanes, registers, splat

# Columns of the matrix that a column of an operand stands for.
_PER_WORD = {"packed": 1, "bf16": 2, "i8": 4}


@dataclass(frozen=True)
class _Slice:
    """The columns of a buffer from `start` on."""

    buffer: Any
    start: Any

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        row, column = index
        return self.buffer[row, self.start + column]


def _reduction(kind: str, target: Target, format: str, columns: int) -> tuple[list[str], Callable[[list[Any]], Reduce]]:
    """dtypes of the left operands and the weight, and what makes a reduction of them."""
    packing = FORMATS[format]
    if kind == "bf16":
        return ["int32", "int32"], bf16_body(target, -(-columns // 2))
    if not isinstance(packing, BlockFormat):
        return ["float32", "float32"], f32_body(columns)
    if kind == "packed":
        return ["float32", "int32"], packed_body(target, packing, columns)
    return ["int32", "float32", "float32", "int32"], i8_body(target, packing, columns)


def _frame(
    dtypes: list[str], shapes: list[Any], tiles: int, body: Callable[[list[Any], Any, Any], None]
) -> tirx.PrimFunc:
    """`body(buffers, tile, row)` for every tile, in parallel, and every row."""
    with IRBuilder() as builder, T.prim_func():
        T.func_attr({"tirx.noalias": True})
        handles = [T.arg(f"a{i}", T.handle()) for i in range(len(shapes))]
        buffers = [T.match_buffer(h, s, d) for h, s, d in zip(handles, shapes, dtypes, strict=True)]
        with T.parallel(0, tiles) as tile, T.serial(0, shapes[0][0]) as row:
            body(buffers, tile, row)
    return builder.get()


def _tile_of(expert: Any, tiles: int, tile: Any) -> Any:
    """The tile of the stacked matrices that is the expert's `tile`; 64 bits, for all experts can have 2^31 words."""
    place = registers((1,), "int64")
    T.buffer_store(place, T.cast(expert, "int64") * tiles + T.cast(tile, "int64"), [0])
    return place[0]


def experts_in(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, C), ids (M, U), packed weight (E F, C) -> (M, U F), F = attrs width."""
    columns = int(shapes[0][1]) * _PER_WORD[kind]
    (*left, weight), make = _reduction(kind, target, attrs["format"], columns)
    width, used = int(attrs["width"]), int(shapes[-3][1])
    tiles = width // TILE

    def body(buffers: list[Any], tile: Any, row: Any) -> None:
        *left, ids, weight, out = buffers
        reduce = make([*left, weight])
        with T.serial(0, used) as u:
            acc = reduce(_tile_of(ids[row, u], tiles, tile), row, 1)
            T.buffer_store(out, get(acc, 0), [row, lanes(u * width + tile * TILE)])

    return _frame([*left, "int32", weight, "float32"], shapes, tiles, body)


def experts_out(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, U F), ids and weights (M, U), packed weight (E C, F) -> (M, C), C = attrs width."""
    used = int(shapes[-4][1])
    columns = int(shapes[0][1]) * _PER_WORD[kind] // used
    (*left, weight), make = _reduction(kind, target, attrs["format"], columns)
    tiles = int(attrs["width"]) // TILE

    def body(buffers: list[Any], tile: Any, row: Any) -> None:
        *left, ids, weights, weight, out = buffers
        total = zeros(1, "float32")
        with T.serial(0, used) as u:
            reduce = make([*_slices(left, kind, attrs["format"], columns, used, u), weight])
            acc = reduce(_tile_of(ids[row, u], tiles, tile), row, 1)
            put(total, 0, fma(splat(weights[row, u]), get(acc, 0), get(total, 0)))
        T.buffer_store(out, get(total, 0), [row, lanes(tile * TILE)])

    return _frame([*left, "int32", "float32", weight, "float32"], shapes, tiles, body)


def _slices(left: list[Any], kind: str, format: str, columns: int, used: int, u: Any) -> list[Any]:
    """The left operands' columns of slice u, as if they were all there is.

    Sums of codes are those of blocks of 32 columns, and after these, for all slices, of 16.
    """
    words = _Slice(left[0], u * (columns // _PER_WORD[kind]))
    if kind != "i8":
        return [words]
    packing = FORMATS[format]
    assert isinstance(packing, BlockFormat)
    blocks = columns // BLOCK
    halves = packing.block == SUM_BLOCK  # then the reduction asks for sums of 16, which it expects after its own of 32
    sums = u * (columns // SUM_BLOCK) + (used - 1) * blocks if halves else u * blocks
    return [words, _Slice(left[1], u * blocks), _Slice(left[2], sums)]


KERNELS: dict[str, Any] = {
    f"{kind}_experts_{way}": partial(make, kind)
    for kind in _PER_WORD
    for way, make in (("in", experts_in), ("out", experts_out))
}
