"""Scales and offsets of a row's blocks, as compiler/formats/layout.py keeps them in tables of a record or of a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE, BlockFormat
from llmc.targets.cuda.launch import f32, held, u32
from llmc.targets.cuda.prelude import center, half

Word = Callable[[Any], Any]  # a place -> the word there, as uint32


class Scales:
    """Of one row 0..15 of a tile.

    `word` has the tables of a record, of the kind "row" the table of sub-scales, from any block on; `of_row` is what
    that kind has for the whole row.
    """

    def __init__(self, format: BlockFormat, row: Any, word: Word, of_row: Any = None) -> None:
        self.format, self.row, self.word, self.of_row = format, row, word, of_row
        self.per_record = format.columns // format.block

    def centered(self, block: Any) -> tuple[Any, Any]:
        """Scale and offset of block `block` of the tables for values less the format's center; of no offset, None."""
        scale, offset = self._block(block)
        scale = held(scale)
        return scale, None if offset is None else held(scale * f32(center(self.format)) + offset)

    def _block(self, block: Any) -> tuple[Any, Any]:
        """scale * value + offset is the weight; where the offset is a number of the format, None."""
        at, kind, offset = block * TILE + self.row, self.format.scale, self.format.offset
        if kind == "row":
            sub = held(self._signed(self._byte(0, at)))
            return self.of_row * (sub * T.fabs(sub)), None
        if kind == "super":
            return self._super(at)
        scale = held(self._half(0, at))
        if isinstance(offset, int):
            return scale, None
        other = self._half(self.per_record * TILE // 2, at)
        return scale, other if offset == "minimum" else -scale * other

    def _super(self, at: Any) -> tuple[Any, Any]:
        both, minimum = self.format.sub_bits == 4, self.format.offset == "minimum"
        subs = self.per_record * TILE // 4  # words of a table of bytes
        byte = held(self._byte(0, at), "uint32")
        sub = T.cast(byte & u32(15), "float32") if both else self._signed(byte)
        after = subs * (2 if minimum and not both else 1)
        scale = self._half(after, self.row) * sub
        if not minimum:
            return scale, None
        taken = T.cast(byte >> u32(4) if both else self._byte(subs, at), "float32")
        return scale, f32(0) - self._half(after + TILE // 2, self.row) * taken

    def _byte(self, start: Any, at: Any) -> Any:
        """Byte `at` from word `start` on, as uint32."""
        return (self.word(start + T.floordiv(at, 4)) >> T.cast(T.floormod(at, 4) * 8, "uint32")) & u32(0xFF)

    def _signed(self, byte: Any) -> Any:
        """The int8 of a byte, as float32."""
        return T.cast(T.cast(byte ^ u32(0x80), "int32") - 128, "float32")

    def _half(self, start: Any, at: Any) -> Any:
        """The float16 of place `at` from word `start` on, as float32."""
        return half(self.word(start + T.floordiv(at, 2)) >> T.cast(T.floormod(at, 2) * 16, "uint32"))
