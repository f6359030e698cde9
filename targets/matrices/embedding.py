"""Embedding: rows of a packed table, decoded one at a time from the tiles that linear layers read too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import FORMATS, TILE, BlockFormat, ceil_to
from llmc.compiler.formats.layout import SPREAD
from llmc.targets.rows.rows import kernel
from llmc.targets.target import Target
from llmc.targets.vector import f32, i32, registers

# decode(tile, row in tile, column) -> float32
Decode = Callable[[Any, Any, Any], Any]


def packed_embedding(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """ids (M,), packed table -> (M, width), zeros where an id is below 0."""
    format, width = FORMATS[attrs["format"]], int(attrs["width"])

    def body(buffers: list[Any], row: Any) -> None:
        ids, table, out = buffers
        decode = _decoder(format, table, width)
        tile, lane = T.floordiv(ids[row], TILE), T.floormod(ids[row], TILE)
        with T.If(ids[row] < 0):
            with T.Then(), T.serial(0, width) as column:
                T.buffer_store(out, f32(0), [row, column])
            with T.Else(), T.serial(0, width) as column:
                T.buffer_store(out, decode(tile, lane, column), [row, column])

    return kernel(["int32", format.dtype, "float32"], shapes, body)


def _decoder(format: Any, table: Any, width: int) -> Decode:
    if isinstance(format, BlockFormat):
        return _Block(format, table, ceil_to(width, format.columns), _stacked(format)).decode
    if format.name == "f32":
        return lambda tile, lane, column: table[tile, column, lane]

    def bf16(tile: Any, lane: Any, column: Any) -> Any:
        word = table[tile, T.floordiv(column, 2), lane]
        shift = T.Select(T.floormod(column, 2) == 0, i32(16), i32(0))
        return T.reinterpret(T.bitwise_and(T.shift_left(word, shift), i32(-65536)), dtype="float32")

    return bf16


def _stacked(format: BlockFormat) -> Any:
    """The codebook on the stack: what code c stands for, or its pair, low half first."""
    if format.values is None:
        return None
    stacked = registers((len(format.values),), "int32")
    for code, entry in enumerate(format.values.reshape(len(format.values), -1)):
        both = sum(int(value) << (16 * i) for i, value in enumerate(entry))
        T.buffer_store(stacked, i32(both), [code])
    return stacked


@dataclass(frozen=True)
class _Block:
    """One number of a block format: compiler/formats/layout.py read an element at a time."""

    format: BlockFormat
    table: Any
    columns: int
    values: Any  # the codebook, or None

    def decode(self, tile: Any, lane: Any, column: Any) -> Any:
        """scale * value + offset."""
        format = self.format
        column = T.cast(column, "int32")
        record, inside = T.floordiv(column, format.columns), T.floormod(column, format.columns)
        at = format.head_words(self.columns) + record * format.record_words
        value = T.cast(self._value(tile, lane, at, inside), "float32")
        scale, offset = self._scale(tile, lane, at, record, inside)
        return value * scale + offset

    def _value(self, tile: Any, lane: Any, at: Any, inside: Any) -> Any:
        format = self.format
        per_group = 8 if format.pair else 4
        unit, in_unit = T.floordiv(inside, format.unit), T.floormod(inside, format.unit)
        group, position = T.floordiv(in_unit, per_group), T.floormod(in_unit, 4)
        first = at + unit * (sum(format.planes) * TILE) + lane
        code: Any = i32(0)
        shift, start = 0, 0
        for bits in format.planes:
            piece = self._piece(tile, first + start, group, position, bits)
            code = T.bitwise_or(code, T.shift_left(piece, i32(shift)))
            shift, start = shift + bits, start + bits * TILE
        if self.values is None:
            return code
        second = T.floormod(T.floordiv(in_unit, 4), 2) if format.pair else i32(0)
        return T.bitwise_and(T.shift_right(self.values[code], second * 16), i32(0xFF))

    def _piece(self, tile: Any, first: Any, group: Any, position: Any, bits: int) -> Any:
        """A plane's bits of one code."""

        def part(register: Any, at: Any, count: int) -> Any:
            byte = T.shift_right(self.table[tile, first + register * TILE], position * 8 + at)
            return T.bitwise_and(byte, i32((1 << count) - 1))

        if bits not in SPREAD:
            return part(T.floormod(group, bits), T.floordiv(group, bits) * bits, bits)
        own, spread = part(T.floormod(group, bits), 0, bits), SPREAD[bits]
        extra: Any = i32(0)
        for i in range(spread):
            # The remainder keeps the index inside the record for every group: both sides of a Select are read.
            piece = part(T.floormod(group * spread, bits) + i, bits, 8 - bits)
            extra = T.bitwise_or(extra, T.shift_left(piece, i32(i * (8 - bits))))
        return T.Select(group < bits, own, extra)

    def _scale(self, tile: Any, lane: Any, at: Any, record: Any, inside: Any) -> tuple[Any, Any]:
        format = self.format
        block, per_record = T.floordiv(inside, format.block), format.columns // format.block
        tables = at + format.code_words
        if format.scale == "row":
            row = T.reinterpret(self.table[tile, lane], dtype="float32")
            sub = self._byte(tile, i32(TILE), (record * per_record + block) * TILE + lane, 0, 8, True)
            scale = row * (sub * T.Select(sub < f32(0), f32(0) - sub, sub))
            return scale, scale * f32(-self._zero())
        if format.scale == "f16":
            scale = self._half(tile, tables, block * TILE + lane)
            if isinstance(format.offset, int):
                return scale, scale * f32(-self._zero())
            stored = self._half(tile, tables + per_record * 8, block * TILE + lane)
            return scale, stored if format.offset == "minimum" else scale * stored * f32(-1)
        return self._super(tile, lane, tables, block, per_record)

    def _super(self, tile: Any, lane: Any, tables: Any, block: Any, per_record: int) -> tuple[Any, Any]:
        format, subs = self.format, per_record * 4
        bits = format.sub_bits
        both = 2 if format.offset == "minimum" and bits == 8 else 1
        supers = tables + subs * both
        sub = self._byte(tile, tables, block * TILE + lane, 0, bits, bits == 8)
        scale = self._half(tile, supers, lane) * sub * f32(format.factor)
        if format.offset != "minimum":
            return scale, scale * f32(-self._zero())
        where, shift = (tables, bits) if bits == 4 else (tables + subs, 0)
        minimum = self._byte(tile, where, block * TILE + lane, shift, bits, False)
        return scale, self._half(tile, supers + 8, lane) * minimum * f32(-1)

    def _zero(self) -> int:
        assert isinstance(self.format.offset, int)
        return self.format.offset

    def _byte(self, tile: Any, first_word: Any, index: Any, shift: int, bits: int, signed: bool) -> Any:
        """`bits` of byte `index` of the words from `first_word` on, as float32."""
        word = self.table[tile, first_word + T.floordiv(index, 4)]
        found = T.shift_right(word, T.floormod(index, 4) * 8 + shift)
        found = T.bitwise_and(found, i32((1 << bits) - 1))
        if signed:
            found = T.shift_right(T.shift_left(found, i32(24)), i32(24))
        return T.cast(found, "float32")

    def _half(self, tile: Any, first_word: Any, index: Any) -> Any:
        """float16 number `index` of the words from `first_word` on, as float32, in integer steps."""
        word = self.table[tile, first_word + T.floordiv(index, 2)]
        bits = T.bitwise_and(T.shift_right(word, T.floormod(index, 2) * 16), i32(0xFFFF))
        magnitude = T.shift_left(T.bitwise_and(bits, i32(0x7FFF)), i32(13))
        sign = T.shift_left(T.bitwise_and(bits, i32(0x8000)), i32(16))
        scaled = T.reinterpret(magnitude, dtype="float32") * tirx.const(2.0**112, "float32")
        return T.reinterpret(T.bitwise_or(T.reinterpret(scaled, dtype="int32"), sign), dtype="float32")
