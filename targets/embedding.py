"""Embedding: rows of a packed table, decoded one at a time from the tiles that linear layers read too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, FORMATS, GROUP, TILE
from llmc.targets.rows import kernel
from llmc.targets.target import Target
from llmc.targets.vector import i32

# decode(table, tile, row in tile, column) -> float32
Decode = Callable[[Any, Any, Any, Any], Any]


def _f32(table: Any, tile: Any, lane: Any, column: Any) -> Any:
    return table[tile, column, lane]


def _bf16(table: Any, tile: Any, lane: Any, column: Any) -> Any:
    word = table[tile, T.floordiv(column, 2), lane]
    shift = T.Select(T.floormod(column, 2) == 0, i32(16), i32(0))
    return T.reinterpret(T.bitwise_and(T.shift_left(word, shift), i32(-65536)), dtype="float32")


def _place(column: Any, code_words: int) -> tuple[Any, Any, Any]:
    """(record, first word of its block, column in the block) of a block format."""
    record, block = T.floordiv(column, GROUP), T.floormod(T.floordiv(column, BLOCK), GROUP // BLOCK)
    return record, block * code_words, T.floormod(column, BLOCK)


def _byte(word: Any, index: Any) -> Any:
    return T.bitwise_and(T.shift_right(word, T.cast(index * 8, "int32")), i32(0xFF))


def _half(table: Any, tile: Any, record: Any, first_word: Any, index: Any) -> Any:
    """float16 number `index` of the words from `first_word` on, as float32 (integer steps: no machine's intrinsic)."""
    word = table[tile, record, first_word + T.floordiv(index, 2)]
    bits = T.bitwise_and(T.shift_right(word, T.cast(T.floormod(index, 2) * 16, "int32")), i32(0xFFFF))
    magnitude = T.shift_left(T.bitwise_and(bits, i32(0x7FFF)), i32(13))
    sign = T.shift_left(T.bitwise_and(bits, i32(0x8000)), i32(16))
    scaled = T.reinterpret(magnitude, dtype="float32") * tirx.const(2.0**112, "float32")
    return T.reinterpret(T.bitwise_or(T.reinterpret(scaled, dtype="int32"), sign), dtype="float32")


def _q8(table: Any, tile: Any, lane: Any, column: Any) -> Any:
    record, first, inside = _place(column, 128)
    code = _byte(table[tile, record, first + T.floordiv(inside, 4) * TILE + lane], T.floormod(inside, 4))
    block = T.floordiv(first, 128)
    scale = _half(table, tile, record, 256 + block * 8, lane)
    return T.cast(code - i32(128), "float32") * scale


def _q4(table: Any, tile: Any, lane: Any, column: Any) -> Any:
    record, first, inside = _place(column, 64)
    group = T.floordiv(inside, 4)
    byte = _byte(table[tile, record, first + T.floormod(group, 4) * TILE + lane], T.floormod(inside, 4))
    code = T.bitwise_and(T.shift_right(byte, T.cast(T.floordiv(group, 4) * 4, "int32")), i32(15))
    block = T.floordiv(first, 64)
    scale = _half(table, tile, record, 128 + block * 8, lane)
    minimum = _half(table, tile, record, 144 + block * 8, lane)
    return T.cast(code, "float32") * scale + minimum


_DECODERS: dict[str, Decode] = {"f32": _f32, "bf16": _bf16, "q8": _q8, "q4": _q4}


def packed_embedding(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """ids (M,), packed table -> (M, width)."""
    format = FORMATS[attrs["format"]]
    decode, width = _DECODERS[format.name], int(attrs["width"])

    def body(buffers: list[Any], row: Any) -> None:
        ids, table, out = buffers
        tile, lane = T.floordiv(ids[row], TILE), T.floormod(ids[row], TILE)
        with T.serial(0, width) as column:
            T.buffer_store(out, decode(table, tile, lane, column), [row, column])

    return kernel(["int32", format.dtype, "float32"], shapes, body)
