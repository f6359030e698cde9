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

    def scale(self, block: Any) -> Any:
        """What values of block `block` of the tables are multiplied with."""
        at, kind = block * TILE + self.row, self.format.scale
        if kind == "row":
            sub = held(self._signed(self._byte(0, at)))
            return held(self.of_row * (sub * T.fabs(sub)))
        if kind == "f16":
            return held(self._half(0, at))
        byte = self._byte(0, at)
        sub = T.cast(byte & u32(15), "float32") if self.format.sub_bits == 4 else self._signed(byte)
        return held(self._half(self._after_subs(), self.row) * f32(self.format.factor) * sub)

    def offset(self, block: Any, scale: Any) -> Any:
        """What is added to values, less the format's center, by this scale; None where no offset is stored."""
        if isinstance(self.format.offset, int):
            return None
        at = block * TILE + self.row
        if self.format.scale == "super":
            offset = self._super_minimum(at)
        else:
            offset = self._half(self.per_record * TILE // 2, at)
            if self.format.offset == "zero":
                offset = -scale * offset
        return held(scale * f32(center(self.format)) + offset)

    def _super_minimum(self, at: Any) -> Any:
        if self.format.sub_bits == 4:
            taken = self._byte(0, at) >> u32(4)
        else:
            taken = self._byte(self.per_record * TILE // 4, at)
        return f32(0) - self._half(self._after_subs() + TILE // 2, self.row) * T.cast(taken, "float32")

    def _after_subs(self) -> int:
        """The first word behind tables of a byte for each block."""
        both = self.format.offset == "minimum" and self.format.sub_bits == 8
        return self.per_record * TILE // 4 * (2 if both else 1)

    def _byte(self, start: Any, at: Any) -> Any:
        """Byte `at` from word `start` on, as uint32."""
        return (self.word(start + T.floordiv(at, 4)) >> T.cast(T.floormod(at, 4) * 8, "uint32")) & u32(0xFF)

    def _signed(self, byte: Any) -> Any:
        """The int8 of a byte, as float32."""
        return T.cast(T.cast(byte ^ u32(0x80), "int32") - 128, "float32")

    def _half(self, start: Any, at: Any) -> Any:
        """The float16 of place `at` from word `start` on, as float32."""
        return half(self.word(start + T.floordiv(at, 2)) >> T.cast(T.floormod(at, 2) * 16, "uint32"))
