"""Packed weights in registers: the numbers of one matrix row, a unit of columns at a time, out of any weight format.

The layout is that of compiler/formats/, the same as CPUs read: a tile of 16 rows has its words interleaved, so that 16
neighbouring threads, one a row, read 64 bytes that stand together. One file of weights then serves variants of both
kinds. A unit is 32 columns, of codes for pairs 64: what the planes of a block format are laid out for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, TILE, BlockFormat, ceil_to
from llmc.compiler.formats.layout import places
from llmc.targets.cuda.fragments import Parts, high, low, parted
from llmc.targets.cuda.launch import barrier, f32, held, local, shared, u32
from llmc.targets.vector import i32

Unit = Iterator[tuple[int, list[Any]]]  # first column in the unit -> the numbers of four columns from there on
_PLAIN_UNIT = 32


class Weights:
    """How a packed matrix (N, columns) is read. Made once in a launch, by all threads of a block."""

    def __init__(self, name: str, columns: int, thread: Any, threads: int) -> None:
        self.format, self.columns = FORMATS[name], columns
        block = self.format if isinstance(self.format, BlockFormat) else None
        self.unit = block.unit if block else _PLAIN_UNIT
        self.units = self.count_units(name, columns)
        self.ragged = columns % self.unit != 0  # the last unit has columns that are none of the matrix's
        self.values = None if block is None or block.values is None else _table(block.values, thread, threads)

    @staticmethod
    def count_units(name: str, columns: int) -> int:
        """Units of a row, the last one filled up."""
        format = FORMATS[name]
        if isinstance(format, BlockFormat):
            return ceil_to(columns, format.columns) // format.unit
        return -(-columns // _PLAIN_UNIT)

    def parts(self, matrix: Any, tile: Any, row: Any, unit: Any, count: int) -> Iterator[Parts]:
        """The same weights as so many parts of bfloat16, for tensor cores (targets/cuda/fragments.py)."""
        if self.format.name == "bf16":
            assert count == 1
            for first in range(0, self.unit, 4):
                yield [self._pairs(matrix, tile, row, unit * self.unit + first)]
            return
        for _, numbers in self.read(matrix, tile, row, unit):
            yield parted(numbers, count)

    def read(self, matrix: Any, tile: Any, row: Any, unit: Any) -> Unit:
        """Weights of a row 0..15 of a tile, four columns at a time, in order; zeros beyond the last column or any."""
        if isinstance(self.format, BlockFormat):
            yield from self._read_block(self.format, matrix, tile, row, unit)
            return
        plain = {"f32": self._read_f32, "bf16": self._read_bf16}.get(self.format.name)
        if plain is None:
            raise LlmcError(f"weights in {self.format.name}: no CUDA kernel yet (docs/cuda.md)")
        for first in range(0, self.unit, 4):
            yield first, plain(matrix, tile, row, unit * self.unit + first)

    def _inside(self, column: Any, matrix: Any, at: tuple[Any, Any, Any], nothing: Any) -> Any:
        """A load that is left out beyond the last column."""
        return T.if_then_else(column < self.columns, matrix[at], nothing) if self.ragged else matrix[at]

    def _read_f32(self, matrix: Any, tile: Any, row: Any, first: Any) -> list[Any]:
        return [self._inside(c, matrix, (tile, c, row), f32(0)) for c in (first + i for i in range(4))]

    def _read_bf16(self, matrix: Any, tile: Any, row: Any, first: Any) -> list[Any]:
        return [half(pair) for pair in self._pairs(matrix, tile, row, first) for half in (low, high)]

    def _pairs(self, matrix: Any, tile: Any, row: Any, first: Any) -> list[Any]:
        """Four columns of bfloat16, as two words."""
        words = (self._inside(c, matrix, (tile, T.floordiv(c, 2), row), i32(0)) for c in (first, first + 2))
        return [held(T.reinterpret("uint32", held(word, "int32")), "uint32") for word in words]

    def _read_block(self, format: BlockFormat, matrix: Any, tile: Any, row: Any, unit: Any) -> Unit:
        """Group g of a unit has its columns 4g to 4g + 3, of pairs 8g to 8g + 7."""
        per_record = format.columns // format.unit
        record = format.head_words(self.columns) + T.floordiv(unit, per_record) * format.record_words
        start = record + T.floormod(unit, per_record) * (sum(format.planes) * TILE)
        words = local((sum(format.planes),), "uint32")
        for i in range(sum(format.planes)):
            T.buffer_store(words, T.reinterpret("uint32", matrix[tile, start + i * TILE + row]), [i])
        blocks = format.unit // format.block or 1
        scales = local((2 * blocks,))
        for i in range(blocks):
            block = T.floordiv(unit * format.unit, format.block) + i
            scale, offset = _Tables(format, matrix, tile, row, record, self.columns).block(block)
            T.buffer_store(scales, scale, [2 * i])
            T.buffer_store(scales, offset(scales[2 * i]), [2 * i + 1])
        for group in range(8):
            codes = held(_group(format, words, group), "uint32")
            four = [T.cast((codes >> u32(8 * i)) & u32(0xFF), "int32") for i in range(4)]
            wide = 8 if format.pair else 4
            at = group * wide * blocks // format.unit
            for half in range(wide // 4):
                looked = [self._value(code, half) for code in four]
                yield group * wide + 4 * half, [scales[2 * at] * value + scales[2 * at + 1] for value in looked]

    def _value(self, code: Any, half: int) -> Any:
        """What a code stands for, as float32; of a pair, its half."""
        if self.values is None:
            return T.cast(code, "float32")
        pair = self.values[code]
        return T.cast((pair >> u32(8 * half)) & u32(0xFF), "float32")


def _group(format: BlockFormat, words: Any, group: int) -> Any:
    """The four codes of a group, a byte each, put together from the planes."""
    codes, first, low = u32(0), 0, 0
    for bits in format.planes:
        shift = low
        for register, at, count in places(bits)[group]:
            mask = u32(0x01010101 * ((1 << count) - 1))
            codes = codes | (((words[first + register] >> u32(at)) & mask) << u32(shift))
            shift += count
        first, low = first + bits, low + bits
    return codes


class _Tables:
    """Scales and offsets of a row's blocks, as layout.py keeps them in a record or in the head of a tile."""

    def __init__(self, format: BlockFormat, matrix: Any, tile: Any, row: Any, record: Any, columns: int) -> None:
        self.format, self.matrix, self.tile, self.row, self.columns = format, matrix, tile, row, columns
        self.tables = record + format.code_words
        self.per_record = format.columns // format.block

    def block(self, block: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The scale of block `block` of the row, and its offset by the scale: weight = scale * value + offset."""
        inside, kind = T.floormod(block, self.per_record), self.format.scale
        if kind == "row":
            sub = self._signed(self._byte(TILE, block * TILE + self.row))
            scale = T.reinterpret("float32", self.matrix[self.tile, self.row]) * (sub * T.fabs(sub))
            return scale, self._fixed
        if kind == "super":
            return self._super(inside)
        offset = self.format.offset
        if isinstance(offset, int):
            return self._half(0, inside), self._fixed
        other = self._half(self.per_record * TILE // 2, inside)
        return self._half(0, inside), (lambda scale: other) if offset == "minimum" else (lambda scale: -scale * other)

    def _super(self, inside: Any) -> tuple[Any, Callable[[Any], Any]]:
        at = inside * TILE + self.row
        both, minimum = self.format.sub_bits == 4, self.format.offset == "minimum"
        subs = self.per_record * TILE // 4  # words of a table of bytes
        byte = self._byte(self.tables, at)
        sub = T.cast(byte & u32(15), "float32") if both else self._signed(byte)
        after = subs * (2 if minimum and not both else 1)
        scale = self._half(after, 0) * sub
        if not minimum:
            return scale, self._fixed
        taken = T.cast(byte >> u32(4) if both else self._byte(self.tables + subs, at), "float32")
        least = self._half(after + TILE // 2, 0) * taken
        return scale, lambda _: -least

    def _fixed(self, scale: Any) -> Any:
        assert isinstance(self.format.offset, int)
        return scale * f32(-self.format.offset)

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
        return half_to_float((word >> T.cast(T.floormod(at, 2) * 16, "uint32")) & u32(0xFFFF))


def half_to_float(bits: Any) -> Any:
    """Bits of a float16, in uint32 -> float32, subnormal ones too; not of infinities, which no scale is.

    Its exponent put where float32 has one is too small by 112.
    """
    sign, size = (bits & u32(0x8000)) << u32(16), (bits & u32(0x7FFF)) << u32(13)
    return T.reinterpret("float32", sign | T.reinterpret("uint32", T.reinterpret("float32", size) * f32(2.0**112)))


def _table(values: Any, thread: Any, threads: int) -> Any:
    """What codes stand for in shared memory, a word a code: bytes of the columns of a pair, the first one lowest."""
    entries = np.asarray(values, np.uint32).reshape(len(values), -1)
    words = entries[:, 0] | (entries[:, 1] << 8 if entries.shape[1] == 2 else 0)
    table = shared((len(words),), "uint32")
    # Constants are code here: each thread picks its own of them.
    for first in range(0, len(words), threads):
        part = words[first : first + threads]
        chosen = u32(int(part[0]))
        for i, word in enumerate(part[1:], 1):
            chosen = T.Select(thread == i, u32(int(word)), chosen)
        with T.If(thread < len(part)), T.Then():
            T.buffer_store(table, chosen, [first + thread])
    barrier()
    return table
