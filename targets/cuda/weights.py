"""Packed weights as float32 in registers: the numbers of one matrix row, a unit of columns at a time, of any format.

The layout is that of compiler/formats/, the same as CPUs read: a tile of 16 rows has its words interleaved, so that 16
neighbouring threads, one a row, read 64 bytes that stand together. One file of weights then serves variants of both
kinds. A unit is 32 columns, of codes for pairs 64: what the planes of a block format are laid out for.

Operands of tensor cores are read otherwise: operands.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, TILE, BlockFormat, ceil_to
from llmc.compiler.formats.layout import places
from llmc.targets.cuda.fragments import high, low
from llmc.targets.cuda.launch import barrier, f32, held, local, shared, strided, u32
from llmc.targets.cuda.prelude import bytes_of, center, value
from llmc.targets.cuda.scales import Scales
from llmc.targets.vector import i32

Unit = Iterator[tuple[int, list[Any]]]  # first column in the unit -> the numbers of four columns from there on
_PLAIN_UNIT = 32


class Weights:
    """How a packed matrix (N, columns) is read. Made once in a launch, by all threads of a block."""

    def __init__(self, name: str, columns: int, thread: Any, threads: int) -> None:
        self.format, self.columns = FORMATS[name], columns
        block = self.format if isinstance(self.format, BlockFormat) else None
        self.unit = block.unit if block else _PLAIN_UNIT
        self.units = ceil_to(columns, block.columns) // self.unit if block else -(-columns // _PLAIN_UNIT)
        self.ragged = columns % self.unit != 0  # the last unit has columns that are none of the matrix's
        self.values = None if block is None else value_table(block, thread, threads)

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
        words = (self._inside(c, matrix, (tile, T.floordiv(c, 2), row), i32(0)) for c in (first, first + 2))
        pairs = [held(T.reinterpret("uint32", held(word, "int32")), "uint32") for word in words]
        return [half(pair) for pair in pairs for half in (low, high)]

    def _read_block(self, format: BlockFormat, matrix: Any, tile: Any, row: Any, unit: Any) -> Unit:
        """Group g of a unit has its columns 4g to 4g + 3, of pairs 8g to 8g + 7."""
        per_record = format.columns // format.unit
        record = format.head_words(self.columns) + T.floordiv(unit, per_record) * format.record_words
        start = record + T.floormod(unit, per_record) * (sum(format.planes) * TILE)
        words = local((sum(format.planes),), "uint32")
        for i in range(sum(format.planes)):
            T.buffer_store(words, T.reinterpret("uint32", matrix[tile, start + i * TILE + row]), [i])
        blocks, block = format.unit // format.block or 1, T.floordiv(unit * format.unit, format.block)
        of_row, tables = None, record + format.code_words
        if format.scale == "row":
            of_row, tables = T.reinterpret("float32", matrix[tile, row]), TILE
        else:
            block = T.floormod(block, format.columns // format.block)
        scales = Scales(format, row, lambda at: T.reinterpret("uint32", matrix[tile, tables + at]), of_row)
        found = []
        for i in range(blocks):
            scale = scales.scale(block + i)
            found.append((scale, scales.offset(block + i, scale)))
        for group in range(8):
            codes = held(_group(format, words, group), "uint32")
            wide = 8 if format.pair else 4
            scale, offset = found[group * wide * blocks // format.unit]
            each = [self._numbers(format, codes, i) for i in range(4)]
            for half in range(wide // 4):
                products = [scale * numbers[half] for numbers in each]
                yield group * wide + 4 * half, products if offset is None else [one + offset for one in products]

    def _numbers(self, format: BlockFormat, codes: Any, at: int) -> list[Any]:
        """What code `at` of four stands for, without the format's center; of a pair, both."""
        if self.values is not None:
            word = held(self.values[T.cast((codes >> u32(8 * at)) & u32(0xFF), "int32")], "uint32")
            return [low(word), high(word)]
        # The code as the middle byte of a float: 32768 and the code.
        number = T.reinterpret("float32", held(bytes_of(codes, u32(0x47), 0x4505 | at << 4), "uint32"))
        return [number - f32(32768 + center(format))]


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


def value_table(format: BlockFormat, thread: Any, threads: int, copies: int = 1) -> Any:
    """What codes stand for in shared memory, `copies` words a code (`prelude.value_words`); None: codes are numbers."""
    if format.values is None:
        return None
    count = len(format.values) * copies
    table = shared((count,), "uint32")
    strided(count, thread, threads, lambda i: T.buffer_store(table, value(format, T.floordiv(i, copies)), [i]))
    barrier()
    return table
