"""Linear layers whose activations are rounded to bfloat16: over weights that are bfloat16, and over block formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.matrices.block_linear import format_of, packed_body
from llmc.targets.matrices.linear import MORE_ROWS, Product, Reduce, get, known_rows, put, template, zeros
from llmc.targets.matrices.streams import ask_ahead
from llmc.targets.matrices.tile_bf16 import can_multiply, tile_product
from llmc.targets.matrices.unpacked_linear import can_multiply as can_unpack
from llmc.targets.matrices.unpacked_linear import unpacked_linear
from llmc.targets.target import Target
from llmc.targets.vector import DOT_BF16, dot2_bf16, dot_bf16, dots_bf16, imported, lanes, splat

# Rows of a group, and how many more it may have when there are few: measured.
_ROWS_OF_BF16 = {"avx512_bf16": (12, MORE_ROWS), "avx512f": (6, MORE_ROWS), "avx2": (4, 0)}


def bf16_linear(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K/2) bfloat16 pairs, weight (T, K/2, 16) pairs or one of a block format -> (M, width)."""
    pairs = int(shapes[0][1])
    if attrs["format"] == "bf16":
        return template(target, shapes, bf16_product(target, pairs))
    if can_unpack(target, pairs):
        return unpacked_linear(target, shapes, attrs)
    return template(target, shapes, Product(["int32", "int32"], packed_body(target, format_of(attrs), 2 * pairs, True)))


def bf16_product(target: Target, pairs: int) -> Product:
    """The product of bf16_linear, over `pairs` of columns."""
    if can_multiply(target, pairs):
        return tile_product(target, pairs)
    usual, more = known_rows(target, _ROWS_OF_BF16)
    return Product(["int32", "int32"], bf16_body(target, pairs), more, usual)


def bf16_body(target: Target, pairs: int) -> Callable[[list[Any]], Reduce]:
    """Buffers (x, weight) -> the reduction over `pairs` of columns."""
    one = dots_bf16(target)

    def add(acc: Any, word: Any, left: Any) -> Any:
        return dot_bf16(acc, word, splat(left)) if one else dot2_bf16(acc, word, left)

    def body(buffers: list[Any]) -> Reduce:
        x, weight = buffers

        def reduce(tile: Any, row: Any, rows: int) -> Any:
            acc = zeros(rows, "float32")
            with imported(*[DOT_BF16] * one), T.serial(0, pairs) as k:
                ask_ahead(target, weight, (tile * pairs + k) * TILE, one and rows <= target.knobs.few_rows)
                w = weight[tile, k, lanes(0)]
                for r in range(rows):
                    put(acc, r, add(get(acc, r), w, x[row + r, k]))
            return acc

        return reduce

    return body
