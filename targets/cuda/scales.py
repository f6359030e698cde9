"""Scales and offsets of a row's blocks, as compiler/formats/layout.py keeps them in a record or the head of a tile."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE, BlockFormat
from llmc.targets.cuda.launch import f32, held, u32
from llmc.targets.cuda.prelude import half


class Scales:
    """Of one row of a packed matrix, in the record that begins at word `record` of its tile."""

    def __init__(self, format: BlockFormat, matrix: Any, tile: Any, row: Any, record: Any) -> None:
        self.format, self.matrix, self.tile, self.row = format, matrix, tile, row
        self.tables = record + format.code_words
        self.per_record = format.columns // format.block

    def block(self, block: Any) -> tuple[Any, Any]:
        """The scale of block `block` of the row, and its offset where one is stored: scale * value + offset."""
        inside, kind, offset = T.floormod(block, self.per_record), self.format.scale, self.format.offset
        if kind == "row":
            sub = self._signed(self._byte(TILE, block * TILE + self.row))
            return T.reinterpret("float32", self.matrix[self.tile, self.row]) * (sub * T.fabs(sub)), None
        if kind == "super":
            return self._super(inside)
        scale = held(self._half(0, inside))
        if isinstance(offset, int):
            return scale, None
        other = self._half(self.per_record * TILE // 2, inside)
        return scale, other if offset == "minimum" else -scale * other

    def _super(self, inside: Any) -> tuple[Any, Any]:
        at = inside * TILE + self.row
        both, minimum = self.format.sub_bits == 4, self.format.offset == "minimum"
        subs = self.per_record * TILE // 4  # words of a table of bytes
        byte = self._byte(self.tables, at)
        sub = T.cast(byte & u32(15), "float32") if both else self._signed(byte)
        after = subs * (2 if minimum and not both else 1)
        scale = self._half(after, 0) * sub
        if not minimum:
            return scale, None
        taken = T.cast(byte >> u32(4) if both else self._byte(self.tables + subs, at), "float32")
        return scale, f32(0) - self._half(after + TILE // 2, 0) * taken

    def _byte(self, start: Any, at: Any) -> Any:
        """Byte `at` from word `start` on, as uint32."""
        word = T.reinterpret("uint32", self.matrix[self.tile, start + T.floordiv(at, 4)])
        return (word >> T.cast(T.floormod(at, 4) * 8, "uint32")) & u32(0xFF)

    def _signed(self, byte: Any) -> Any:
        """The int8 of a byte, as float32."""
        return T.cast(T.cast(byte ^ u32(0x80), "int32") - 128, "float32")

    def _half(self, words: Any, inside: Any) -> Any:
        """The float16 of block `inside` and this row, of a table so many words behind the codes, as float32."""
        at = inside * TILE + self.row
        word = T.reinterpret("uint32", self.matrix[self.tile, self.tables + words + T.floordiv(at, 2)])
        return half(word >> T.cast(T.floormod(at, 2) * 16, "uint32"))
