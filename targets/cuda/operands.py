"""Packed weights as operands of tensor cores: 16 rows by 32 columns, out of any weight format.

Of block formats an operand is what codes stand for, whole numbers of at most eight bits, which bfloat16 holds. Scales
multiply sums of products, offsets of blocks sums of x: no weight is rounded, and none is multiplied by its scale.

Lane 4 g + q has rows g and g + 8 of a tile, or rows 2 g and 2 g + 1 in their place, and of 32 columns eight, in words
of two as `Form.pair` says, four words of a row that two products take. Its codes are groups q and q + 4 of a unit,
which it reads where planes keep them (compiler/formats/layout.py). Scales it computes for one block of columns, the
q-th of four; lanes ask each other for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import FORMATS, TILE, BlockFormat
from llmc.compiler.formats.layout import SPREAD
from llmc.targets.cuda.fragments import Parts, parted
from llmc.targets.cuda.launch import from_lane, held, local, shuffled, u32
from llmc.targets.cuda.prelude import bf16_add, bytes_of, center, word_at
from llmc.targets.cuda.scales import Scales
from llmc.targets.cuda.stream import BLOCK, BLOCKS, SLAB, Words
from llmc.targets.cuda.weights import value_table

FEW_VALUES = 64  # that lanes find in hardly more than one turn: there are 32 banks
COPIES = 8  # of more values: fewer lanes share a bank
STEPS = 2  # products of a block of 32 columns


@dataclass(frozen=True)
class Form:
    """What operands of a format are like."""

    name: str

    @property
    def blocks(self) -> BlockFormat | None:
        """The format, if weights are codes."""
        format = FORMATS[self.name]
        return format if isinstance(format, BlockFormat) else None

    @property
    def parts(self) -> int:
        """Of a weight."""
        return 2 if self.name == "f32" else 1

    @property
    def pair(self) -> bool:
        """Whether a lane's words have columns p and p + 4 of eight that stand together, not neighbouring ones."""
        return self.blocks is not None and self.blocks.pair

    @property
    def scales(self) -> int:
        """Of 32 columns, or of more."""
        return 0 if self.blocks is None else max(BLOCK // self.blocks.block, 1)

    @property
    def offsets(self) -> int:
        """Stored offsets of 32 columns, or of more."""
        return 0 if self.blocks is None or isinstance(self.blocks.offset, int) else self.scales

    @property
    def run(self) -> int:
        """Products whose sum is multiplied by a scale, never more than two; 0: there are no scales."""
        return 0 if self.blocks is None else min(self.blocks.block * STEPS // BLOCK, STEPS)

    @property
    def copies(self) -> int:
        """Of what codes stand for, in shared memory; 0: codes are numbers."""
        if self.blocks is None or self.blocks.values is None:
            return 0
        return COPIES if len(self.blocks.values) > FEW_VALUES else 1

    @property
    def value_bytes(self) -> int:
        """Shared memory that they take."""
        return self.values_at(self.copies)

    def values_at(self, copies: int) -> int:
        """Shared memory that so many copies take."""
        return 0 if self.blocks is None or self.blocks.values is None else 4 * copies * (self.blocks.top + 1)


class Operands:
    """What a lane knows of operands of a form. Made once in a launch, by all threads of a block.

    `threads`: of the block; None where no weights are read. `copies`: of what codes stand for, unless it is the form's.
    `beside`: a lane's rows are neighbours, whose words stand side by side.
    """

    def __init__(
        self, form: Form, thread: Any, threads: int | None = None, copies: int | None = None, beside: bool = False
    ) -> None:
        self.form, self.copies, self.beside = form, copies or form.copies, beside
        self.first, self.quarter = T.floordiv(thread, 4) % 8, thread % 4
        self.values = None
        if threads is not None and form.blocks is not None and form.copies:
            # Where a lane's copy stands, in bytes: by way of a shuffle, so that nvcc does not find it again each time.
            self.copy = shuffled(T.cast(thread % self.copies * 4, "uint32"), 0)
            self.values = value_table(form.blocks, thread, threads, self.copies)

    def row(self, half: int) -> Any:
        """The lane's first or second row of a tile."""
        return self.first * 2 + half if self.beside else self.first + 8 * half

    def of_rows(self, words: Words, piece: int, at: Any) -> list[Any]:
        """Words of both rows, of 16 of a piece from word `at` on."""
        if self.beside:
            return words.pair(piece, at + self.row(0))
        return [words.word(piece, at + self.row(half)) for half in range(2)]

    def slab(self, words: Words) -> Plain | Coded:
        """The lane's part of 128 columns of a tile."""
        return Plain(self, words) if self.form.blocks is None else Coded(self, self.form.blocks, words)


class Plain:
    """Weights that are numbers, as one part of bfloat16 or two."""

    def __init__(self, operands: Operands, words: Words) -> None:
        self.operands, self.read = operands, words

    def words(self, block: int) -> list[Parts]:
        """For each product of a block, its four words by parts: both rows at two columns, at two more."""
        return [self._parts(block * BLOCK + step * 16 + self.operands.quarter * 4) for step in range(STEPS)]

    def _parts(self, first: Any) -> Parts:
        """Four columns of both rows."""
        own = self.operands
        if own.form.parts == 1:
            return [[word for i in (0, 2) for word in own.of_rows(self.read, 0, T.floordiv(first + i, 2) * TILE)]]
        columns = [own.of_rows(self.read, 0, (first + i) * TILE) for i in range(4)]
        rows = [parted([T.reinterpret("float32", both[half]) for both in columns], 2) for half in range(2)]
        return [[rows[0][part][0], rows[1][part][0], rows[0][part][1], rows[1][part][1]] for part in range(2)]


class Coded:
    """Weights of a block format: words of codes as they are read, and the scales of a lane's own block."""

    def __init__(self, operands: Operands, format: BlockFormat, words: Words) -> None:
        self.operands, self.format, self.quarter = operands, format, operands.quarter
        self.read = [
            list(zip(*(self._plane(words, unit, at, bits) for at, bits in _starts(format)), strict=True))
            for unit in range(SLAB // format.unit)
        ]
        self.tables = [self._tables(words, half) for half in range(2)]
        self.scales = [
            [scales.scale(first + at) for at in range(operands.form.scales)] for scales, first in self.tables
        ]

    def words(self, block: int) -> list[Parts]:
        """For each product of a block, its four words: both rows at two columns, at two more."""
        per_unit = self.format.unit // BLOCK
        rows = []
        for half in range(2):
            planes = self.read[block // per_unit][half]
            if self.format.pair:
                codes = self._codes(planes, block % 2)
                rows.append([self._value(codes, at) for at in range(4)])
            else:
                rows.append([word for step in range(STEPS) for word in self._numbers(self._codes(planes, step))])
        return [[[rows[0][at], rows[1][at], rows[0][at + 1], rows[1][at + 1]]] for at in (0, 2)]

    def scale(self, step: int) -> list[Any]:
        """Of both rows, for the run of products that step `step` of the slab ends."""
        block = (step + 1 - self.operands.form.run) // STEPS
        at = step % self.operands.form.scales if self.operands.form.run == 1 else 0
        return [from_lane(self.scales[half][at], block, 4) for half in range(2)]

    def offsets(self, at: int) -> list[Any]:
        """Of both rows, for offset `at` of the lane's own block."""
        return [
            scales.offset(first + at, own[at]) for (scales, first), own in zip(self.tables, self.scales, strict=True)
        ]

    def _tables(self, words: Words, half: int) -> tuple[Scales, Any]:
        """Of a row: where its scales stand, and which is the first of the lane's own block."""
        format, row, q = self.format, self.operands.row(half), self.quarter
        count, of_row = self.operands.form.scales, None
        if format.scale == "row":
            of_row = words.of_row(row)
            block, word = T.floordiv(q * BLOCK, format.block), (lambda at: words.word(1, at))
        elif format.scale == "super":
            block, word = (words.slab % (format.columns // SLAB) * BLOCKS + q) * count, (lambda at: words.word(1, at))
        else:
            per_record = format.columns // BLOCK
            tables = T.floordiv(q, per_record) * format.record_words + format.code_words
            block = T.floordiv(q % per_record * BLOCK, format.block)
            word = lambda at: words.word(0, tables + at)  # noqa: E731
        return Scales(format, row, word, of_row), block

    def _plane(self, words: Words, unit: int, start: int, bits: int) -> list[tuple[int, list[Any]]]:
        """Of both rows, the registers of a plane that have the lane's groups, as words; shifted where that is the
        lane's alone."""
        format, q = self.format, self.quarter
        units = min(format.columns // format.unit, SLAB // format.unit)  # of a record, or of the part in a slab
        codes = unit // units * format.record_words + unit % units * sum(format.planes) * TILE

        def of_rows(register: Any) -> list[Any]:
            return self.operands.of_rows(words, 0, codes + (start + register) * TILE)

        if bits == 8 or bits in SPREAD:
            both = of_rows(q), of_rows(q + 4 if bits == 8 else T.min(q + 4, bits - 1))
            return [(bits, list(registers)) for registers in zip(*both, strict=True)]
        own = T.cast(T.floordiv(q, bits) * bits, "uint32")
        return [(bits, [one if bits == 4 else held(one >> own, "uint32")]) for one in of_rows(q % bits)]

    def _codes(self, planes: Sequence[tuple[int, list[Any]]], step: int) -> Any:
        """Group q + 4 * step of a unit, a code a byte."""
        codes, low = u32(0), 0
        for bits, words in planes:
            mask = u32(0x01010101 * ((1 << bits) - 1))
            if bits == 8:
                found = words[step]
            elif bits not in SPREAD:
                found = (words[0] >> u32(4 * step)) & mask
            elif step == 0:
                found = words[0] & mask
            else:
                found = T.Select(self.quarter + 4 < bits, words[1] & mask, self._extra(bits, words))
            codes, low = codes | (found << u32(low)), low + bits
        return held(codes, "uint32")

    def _extra(self, bits: int, words: list[Any]) -> Any:
        """Of 6 and 7 bits: groups beyond the registers, whose bits lie above those of the others, in four lanes."""
        q, above, spread = self.quarter, 8 - bits, SPREAD[bits]
        mask = u32(0x01010101 * ((1 << above) - 1))
        pieces = []
        for extra in range(8 - bits):
            piece = u32(0)
            for word, register in ((words[0], q), (words[1], q + 4)):
                own = register - extra * spread
                there = (own >= 0) & (own < spread) & (register < bits)
                shift = T.cast(T.max(own, 0) * above, "uint32")
                piece = piece | T.Select(there, ((word >> u32(bits)) & mask) << shift, u32(0))
            pieces.append(held(piece, "uint32"))
        total = local((1,), "uint32")
        if len(pieces) == 1:
            T.buffer_store(total, pieces[0] | shuffled(pieces[0], 1), [0])
        else:  # lanes of even q put the first extra group together, those of odd q the second one
            given = held(T.Select(q % 2 == 0, pieces[1], pieces[0]), "uint32")
            kept = T.Select(q % 2 == 0, pieces[0], pieces[1])
            T.buffer_store(total, kept | shuffled(given, 1), [0])
        T.buffer_store(total, total[0] | shuffled(total[0], 2), [0])
        return total[0]

    def _numbers(self, codes: Any) -> list[Any]:
        """Four codes -> what they stand for, without the format's center: two pairs of bfloat16."""
        if self.operands.values is not None:
            each = [self._value(codes, at) for at in range(4)]
            return [held(bytes_of(each[at], each[at + 1], 0x5410), "uint32") for at in (0, 2)]
        biased, taken = codes, [u32(_bf16_twice(-128 - center(self.format)))] * 2
        if sum(self.format.planes) == 8:  # 128 and the low bits; the rest, less 256, is in what is added
            biased = held(codes & u32(0x7F7F7F7F), "uint32")
            rest = held((codes ^ u32(0xFFFFFFFF)) & u32(0x80808080), "uint32")
            taken = [bytes_of(rest, u32(0xC3C3C3C3), chosen) for chosen in _SPACED]
        pairs = [bytes_of(biased, u32(0x43434343), chosen) for chosen in _SPACED]
        return [held(bf16_add(pair, less), "uint32") for pair, less in zip(pairs, taken, strict=True)]

    def _value(self, codes: Any, at: int) -> Any:
        """The word that code `at` of four stands for."""
        bits = self.operands.copies.bit_length() + 1  # of a place within the words of a code, in bytes
        if bits == 8:  # that place and the code are a byte each, of the lane's copy nothing else
            place = bytes_of(codes, self.operands.copy, 0x5504 | at << 4)
            return held(word_at(self.operands.values, place), "uint32")
        code = codes << u32(bits) if at == 0 else codes >> u32(8 * at - bits)
        place = (code & u32(0xFF << bits)) | self.operands.copy
        return held(word_at(self.operands.values, place), "uint32")


_SPACED = (0x4140, 0x4342)  # bytes 0 and 1, 2 and 3, each below a byte of the other word


def _starts(format: BlockFormat) -> list[tuple[int, int]]:
    """For each plane: its first register of a unit, and its bits."""
    return [(sum(format.planes[:at]), bits) for at, bits in enumerate(format.planes)]


def _bf16_twice(number: int) -> int:
    """A pair of bfloat16, both this whole number of at most eight bits."""
    bits = int(np.float32(number).view(np.uint32)) >> 16
    return bits | bits << 16
