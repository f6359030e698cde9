"""Linear layers over block formats: one reduction for every format, for int8 and for float32 activations.

The reduction goes by chunks of 64 columns; a chunk's codes and scales are read once and shared by a group of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BlockFormat, block_format
from llmc.compiler.formats.layout import SPREAD
from llmc.targets import tiles
from llmc.targets.matrices import panel_linear, tile_linear, two_tiles
from llmc.targets.matrices.block_dots import add_dots, start_of
from llmc.targets.matrices.block_sums import add_sums, first_total, step_of
from llmc.targets.matrices.codes import CHUNK, Tile, Words
from llmc.targets.matrices.linear import MORE_ROWS, Many, Product, Reduce, f32_linear, get, put, template, zeros
from llmc.targets.narrow import functions
from llmc.targets.target import Target
from llmc.targets.vector import dots_any_bytes, f32, fma, i32, imported, splat, widened

_MANY_ROWS = 6  # of a group: measured


def i8_linear(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """codes (M, P/4), scales (M, P/32), sums or starts (M, 3 P/32), packed weight (T, words) -> (M, width)."""
    return template(target, shapes, i8_product(target, format_of(attrs), int(shapes[0][1]) * 4))


def i8_product(target: Target, format: BlockFormat, columns: int) -> Product:
    """The product of i8_linear over so many columns, padding among them."""
    usual, more = _group(target, format)
    ways = _ways(target, format, columns)
    return Product([*left_types(format), "int32"], i8_body(target, format, columns), more, usual, ways)


def _ways(target: Target, format: BlockFormat, columns: int) -> tuple[Many, ...]:
    """The ways of more rows than go in groups of one tile, that for most of them first."""
    few = two_tiles.few(target, format, columns)
    if tiles.are_there(target) and target.knobs.tile_rows:
        many: Many | None = tile_linear.many(target, format, columns)
    else:
        many = panel_linear.many(target, format, columns, 1 if few is None else two_tiles.MOST + 1)
    if few is not None and many is not None and few.least >= many.least:
        few = None
    return tuple(way for way in (many, few) if way is not None)


def left_types(format: BlockFormat) -> list[str]:
    """Dtypes of what a product with int8 has on its left."""
    return ["int32", "float32", "int32" if format.whole else "float32"]


def _group(target: Target, format: BlockFormat) -> tuple[int | None, int]:
    """Rows of a group, None for what most formats do well with, and how many more it may have when there are few.

    With registers of 256 bits the more rows share what takes long to unpack the better, though sums are spilled. Longer
    blocks have sums of their own besides the dots: they get no more than usual.
    """
    more = MORE_ROWS if format.block <= format.left_block else 0
    if target.has("avx512f"):
        return None, more
    looked_up = format.values is not None and len(format.values) > 16
    dear = looked_up or len(format.planes) > 1 or format.planes[0] in SPREAD
    if target.has("avx2"):
        return (_MANY_ROWS, more) if dear else (None, min(more, 1))
    return None, 0


def i8_body(target: Target, format: BlockFormat, columns: int) -> Callable[[list[Any]], Reduce]:
    """Buffers (codes, scales, sums or starts, weight) -> the reduction over `columns` of them."""
    at_once = dots_any_bytes(target)

    def body(buffers: list[Any]) -> Reduce:
        *left, weight = buffers

        def reduce(tile: Any, row: Any, rows: int) -> Any:
            acc = zeros(rows, "float32")
            reader = Tile(target, format, weight, columns, tile, quick=at_once and rows <= target.knobs.few_rows)
            reader.begin()
            with imported(*functions(target)), T.serial(0, columns // CHUNK) as chunk:
                words = reader.multiplied(chunk)
                for block in range(CHUNK // format.block):
                    _add_block(reader, left, chunk, block, words, row, rows, acc)
            return _finish(reader, acc, rows)

        return reduce

    return body


def packed_linear(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) float32, packed weight -> (M, width): no rounding of activations, at the price of speed."""
    if attrs["format"] == "f32":
        return f32_linear(target, shapes, attrs)
    return template(target, shapes, packed_product(target, format_of(attrs), int(shapes[0][1])))


def packed_product(target: Target, format: BlockFormat, columns: int) -> Product:
    """The product of packed_linear over so many columns."""
    return Product(["float32", "int32"], packed_body(target, format, columns))


def packed_body(
    target: Target, format: BlockFormat, columns: int, in_pairs: bool = False
) -> Callable[[list[Any]], Reduce]:  # fmt: skip
    """Buffers (x, weight) -> the reduction over `columns` of them; `in_pairs`: x are pairs of bfloat16."""
    chunks = -(-columns // CHUNK)

    def body(buffers: list[Any]) -> Reduce:
        x, weight = buffers

        def number(row: Any, column: Any) -> Any:
            if not in_pairs:
                return x[row, column]
            shift = T.cast(T.floormod(column, 2) * 16, "int32")
            return widened(T.shift_right(x[row, T.floordiv(column, 2)], shift))

        def element(row: Any, column: Any) -> Any:
            if columns % CHUNK == 0:
                return number(row, column)
            return T.if_then_else(column < columns, number(row, T.min(column, columns - 1)), f32(0))

        def reduce(tile: Any, row: Any, rows: int) -> Any:
            acc = zeros(rows, "float32")
            reader = Tile(target, format, weight, columns, tile, quick=False)
            reader.begin()
            with imported(*functions(target)), T.serial(0, chunks) as chunk:
                for group, word in enumerate(reader.values(chunk)):
                    scale = reader.scale(chunk, group * 4 // format.block)
                    offset = reader.offset(chunk, group * 4 // format.block, scale)
                    for byte in range(4):
                        code = T.bitwise_and(T.shift_right(word, splat(i32(8 * byte))), splat(i32(0xFF)))
                        w = fma(T.cast(code, "float32x16"), scale, offset)
                        for r in range(rows):
                            left = splat(element(row + r, chunk * CHUNK + group * 4 + byte))
                            put(acc, r, fma(left, w, get(acc, r)))
            return _finish(reader, acc, rows)

        return reduce

    return body


def format_of(attrs: dict[str, Any]) -> BlockFormat:
    """The block format that an op's attributes name."""
    return block_format(attrs["format"])


def _add_block(
    reader: Tile, left: list[Any], chunk: Any, block: int, words: Words, row: Any, rows: int, acc: Any
) -> None:
    """acc += the products of the columns that share a scale and an offset of the weights.

    Dots have a whole-number offset in them, which is in their starts.
    """
    format = reader.format
    codes, scales, totals = left
    step = step_of(format)
    parts = [(chunk * (CHUNK // step) + block * (format.block // step)) + i for i in range(format.block // step)]
    finer = first_total(format, reader.columns)
    scale = reader.scale(chunk, block)
    offset = None if format.whole else reader.offset(chunk, block, scale)

    def start(r: int, part: Any) -> Any:
        return start_of(reader.start_zero, totals[row + r, finer + part]) if format.whole else splat(i32(0))

    groups = step // 4

    def dots_of(part: Any) -> Any:
        starts = [start(r, part) for r in range(rows)]
        return add_dots(
            reader.target, reader.top, codes, row, part * groups, groups, words, starts, signed=reader.signed
        )

    dots = [dots_of(part) for part in parts]
    for r in range(rows):
        own_scales = [scales[row + r, T.floordiv(part * step, format.left_block)] for part in parts]
        own_totals = None if offset is None else [totals[row + r, finer + part] for part in parts]
        sums = add_sums(get(acc, r), [get(dot, r) for dot in dots], own_scales, scale, offset, own_totals)
        put(acc, r, sums)


def _finish(reader: Tile, acc: Any, rows: int) -> Any:
    row_scale = reader.row_scale()
    if row_scale is not None:
        for r in range(rows):
            put(acc, r, get(acc, r) * row_scale)
    return acc
