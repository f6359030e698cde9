"""Reading a block format's records in a kernel: codes as bytes in registers, scales and offsets of a block.

The layout is compiler/formats/layout.py's. A `Tile` stands for one tile of 16 output rows of a packed matrix; a chunk
is 64 of its columns. Everything here is unrolled: groups and blocks are plain numbers, chunks may be loop variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, MIDDLE, TILE, BlockFormat
from llmc.compiler.formats.layout import GROUPS, SPREAD, places
from llmc.targets.lookups import digits, divides, lookup, lookups, words_at_once
from llmc.targets.matrices.streams import ask_ahead
from llmc.targets.narrow import multiplies_signed
from llmc.targets.target import Target
from llmc.targets.vector import (
    dots_any_bytes,
    f32,
    held,
    i32,
    lanes,
    splat,
    widen_f16,
)

CHUNK = 64  # columns of a step of the reduction
_MANY_VECTORS = 32  # that registers hold: then they hold all groups of a unit too

# Groups of four columns: each one's number in its chunk, and its bytes, int32x16, emitted as they are asked for.
Words = Iterator[tuple[int, Any]]


@dataclass(frozen=True)
class Tile:
    """One tile of a packed matrix (T, words)."""

    target: Target
    format: BlockFormat
    weight: Any
    columns: int  # of the matrix, padded to whole chunks
    tile: Any
    quick: bool  # its words are done with as fast as they come
    asks: bool = True  # reading words asks for those ahead; else others do

    @property
    def table(self) -> NDArray[np.uint8] | None:
        """What codes are looked up in, (entries,) or (entries, 2); None: they are taken as they are."""
        format = self.format
        if not self._centred:
            return format.values
        values = np.arange(format.top + 1) if format.values is None else format.values.astype(np.int64)
        return (values - int(format.offset) + MIDDLE).astype(np.uint8)

    @property
    def zero(self) -> int:
        """The byte that stands for a weight of zero, where the format's offset is a whole number."""
        return MIDDLE if self._centred else int(self.format.offset)

    @property
    def top(self) -> int:
        """The greatest byte."""
        return self.format.top if self.table is None else int(self.table.max())

    @property
    def signed(self) -> bool:
        """Whether bytes are multiplied as signed ones: less MIDDLE, where they are too great as they are."""
        return self.format.whole and self.top >= MIDDLE and multiplies_signed(self.target)

    @property
    def start_zero(self) -> int:
        """The byte that stands for a weight of zero, as it is multiplied."""
        return self.zero - MIDDLE if self.signed else self.zero

    @property
    def _centred(self) -> bool:
        """Whether a look-up, which costs no more than clearing the bits of others does, puts zero in the middle."""
        bits = self.format.planes
        looked_up = self.format.values is not None or (len(bits) == 1 and bits[0] < 8)
        return self.format.whole and looked_up and self.target.permutes_bytes and dots_any_bytes(self.target)

    def begin(self) -> None:
        """Ask for what reading a tile leaves out: it begins behind the head, so as much of the stream is skipped."""
        for word in range(0, self.format.head_words(self.columns), TILE):
            self._ask_ahead(word)

    def _at(self, chunk: Any, word: Any) -> Any:
        """Index of a word of the chunk's record."""
        format = self.format
        per_record = format.columns // CHUNK
        record = chunk if per_record == 1 else T.floordiv(chunk, per_record)
        return format.head_words(self.columns) + record * format.record_words + word

    def _inside(self, chunk: Any, per_chunk: int) -> Any:
        """Number of the chunk's first thing in its record, `per_chunk` things a chunk."""
        per_record = self.format.columns // CHUNK
        return 0 if per_record == 1 else T.floormod(chunk, per_record) * per_chunk

    def _block(self, chunk: Any, block: Any) -> Any:
        """Number of the chunk's block in its record."""
        return self._inside(chunk, CHUNK // self.format.block) + block

    def codes(self, chunk: Any, unit: int) -> list[Any]:
        """Eight int32x16 words: the codes of each group of a unit (0, or 1 when a chunk has two).

        Bits above a code's are not cleared when `lookup` ignores them.
        """
        start = self._unit(chunk, unit)
        exact = self.table is None or not self.target.permutes_bytes or len(self.format.planes) > 1
        out: list[Any] = [None] * GROUPS
        shift = 0
        for bits in self.format.planes:
            plane = self._plane(start, bits)
            for group, pieces in enumerate(places(bits)):
                piece = _spread(plane, pieces) if len(pieces) > 1 else _moved(plane, *pieces[0], shift)
                if exact and bits < 8:
                    piece = T.bitwise_and(piece, _bytes_of(((1 << bits) - 1) << shift))
                out[group] = piece if out[group] is None else T.bitwise_or(out[group], piece)
            shift, start = shift + bits, start + bits * TILE
        return out

    @property
    def by_registers(self) -> bool:
        """Whether codes of each register of the first plane are unpacked without those of its others."""
        first, *more = self.format.planes
        return first not in SPREAD and all(bits == 1 for bits in more) and self.format.unit == 4 * GROUPS

    def of_register(self, chunk: Any, unit: Any, register: Any) -> Iterator[Any]:
        """Where codes are unpacked `by_registers`: `values` of each group of one register, the first one first.

        Groups of register r are r, r + b, r + 2 b and so on, b: bits of each. The numbers may be loop variables.
        """
        start = self._unit(chunk, unit)
        first, *more = self.format.planes
        own = [self._load(start + register * TILE)]
        bits = [self._load(start + (first + above) * TILE) for above in range(len(more))]
        bits = [held(T.shift_right(plane, splat(T.cast(register, "int32"))), "int32") for plane in bits]
        exact = self.table is None or bool(more) or not self.target.permutes_bytes
        for at in range(0, 8, first):
            word = _moved(own, 0, at, first, 0)
            if exact and first < 8:
                word = T.bitwise_and(word, _bytes_of((1 << first) - 1))
            for above, _ in enumerate(bits, first):
                bit = T.bitwise_and(_moved(bits, above - first, at, 1, above), _bytes_of(1 << above))
                word = T.bitwise_or(word, bit)
            yield held(word if self.table is None else lookup(self.target, self.table, word), "int32")

    def _unit(self, chunk: Any, unit: Any) -> Any:
        """Index of a unit of the chunk."""
        units = CHUNK // self.format.unit
        return self._at(chunk, (self._inside(chunk, units) + unit) * sum(self.format.planes) * TILE)

    def _plane(self, start: Any, bits: int) -> list[Any]:
        """The registers of a plane that begins there."""
        return [self._load(start + register * TILE) for register in range(bits)]

    def _load(self, index: Any) -> Any:
        self._ask_ahead(index)
        return held(self.weight[self.tile, lanes(index)], "int32")

    def values(self, chunk: Any) -> Iterator[Any]:
        """Sixteen int32x16 words, one for each four columns of the chunk in order: what their codes stand for.

        Emitted as they are asked for, so that few are alive at a time.
        """
        units = CHUNK // self.format.unit
        for unit in range(units):
            codes = self.codes(chunk, unit)
            if unit == units - 1:  # the hardware's prefetcher wants lines in their order
                self._ask_for_tables(chunk)
            yield from self._read(codes)

    def _read(self, codes: list[Any]) -> Iterator[Any]:
        """What codes stand for."""
        table = self.table
        if table is None:
            yield from (held(code, "int32") for code in codes)
            return
        if self.format.base and divides(self.target):
            for code in codes:
                yield from (held(digit, "int32") for digit in digits(self.format.base, held(code, "int32")))
            return
        run = words_at_once(self.target, table)
        for at in range(0, len(codes), run):
            words = [held(code, "int32") for code in codes[at : at + run]]
            for found in lookups(self.target, table, words):
                yield from (held(word, "int32") for word in found)

    def raw(self, chunk: Any) -> Iterator[tuple[Any, int]]:
        """Sixteen int32x16 words, one for each four columns of the chunk in order, and the bit of their first byte that
        codes, or what is looked up for them, begin at. They are of `raw_bits`; bits round them may be anything.
        """
        if self.format.values is not None:
            yield from ((word, 0) for word in self.values(chunk))
            return
        units, (bits, *more) = CHUNK // self.format.unit, self.format.planes
        for unit in range(units):
            if more or bits in SPREAD:
                words = [(code, 0) for code in self.codes(chunk, unit)]
            else:
                plane = self._plane(self._unit(chunk, unit), bits)
                words = [(plane[register], at) for ((register, at, _),) in places(bits)]
            if unit == units - 1:
                self._ask_for_tables(chunk)
            yield from ((held(word, "int32"), at) for word, at in words)

    @property
    def raw_bits(self) -> int:
        """Bits of what `raw` gives."""
        return (self.format.top if self.format.values is None else self.top).bit_length()

    @property
    def raw_zero(self) -> int:
        """Which of it stands for a weight of zero; 0 where that is not a whole number."""
        if not self.format.whole:
            return 0
        return int(self.format.offset) if self.format.values is None else self.zero

    def multiplied(self, chunk: Any) -> Words:
        """`values` as they are multiplied: where `signed`, less MIDDLE. Those of a step come together, in any order."""
        for group, word in self._few_at_once(chunk) if self._spares_registers else enumerate(self.values(chunk)):
            yield group, held(T.bitwise_xor(word, _bytes_of(MIDDLE)), "int32") if self.signed else word

    @property
    def _spares_registers(self) -> bool:
        """Whether words come from one register of codes after another, so that none is kept: where there are few."""
        few, format = self.target.vectors < _MANY_VECTORS, self.format
        single = len(format.planes) == 1
        return few and single and self.by_registers and min(format.block, format.left_block) >= BLOCK

    def _few_at_once(self, chunk: Any) -> Words:
        """`values` with their numbers, those of a register together."""
        units, (bits,) = CHUNK // self.format.unit, self.format.planes
        for unit in range(units):
            for register in range(bits):
                if unit == units - 1 and register == bits - 1:
                    self._ask_for_tables(chunk)
                for piece, word in enumerate(self.of_register(chunk, unit, register)):
                    yield unit * GROUPS + piece * bits + register, word

    def scale(self, chunk: Any, block: Any) -> Any:
        """float32x16 scales of the chunk's block; without the row's for the "row" kind."""
        format = self.format
        if format.scale == "row":
            index = TILE + (chunk * (CHUNK // format.block) + block) * 4
            sub = held(self._bytes(index, signed=True))
            return sub * T.call_llvm_pure_intrin("llvm.fabs", sub, dtype="float32x16")
        if format.scale == "f16":
            return self._halves(self._at(chunk, format.code_words + self._block(chunk, block) * 8))
        return self._supers(chunk) * self._sub(chunk, block, 0)

    def offset(self, chunk: Any, block: Any, scale: Any) -> Any:
        """float32x16 offsets of the chunk's block, whose scale is given."""
        format = self.format
        if format.whole:
            return scale * splat(f32(-self.zero))
        if format.scale == "super":
            minimum = self._halves(self._super(chunk, 1)) * splat(f32(-1))
            return minimum * self._sub(chunk, block, 1)
        blocks = format.columns // format.block
        stored = self._halves(self._at(chunk, format.code_words + (blocks + self._block(chunk, block)) * 8))
        return stored if format.offset == "minimum" else scale * stored * splat(f32(-1))

    def row_scale(self) -> Any:
        """float32x16, or None when blocks carry all of the scale."""
        if self.format.scale != "row":
            return None
        return T.reinterpret(self.weight[self.tile, lanes(0)], dtype="float32x16")

    def _supers(self, chunk: Any) -> Any:
        """float32x16 scales of the chunk's record, before those of blocks."""
        stored = self._halves(self._super(chunk, 0))
        return stored if self.format.factor == 1 else stored * splat(f32(self.format.factor))

    def _super(self, chunk: Any, which: int) -> Any:
        """Index of the record's scale (0) or minimum (1)."""
        format = self.format
        subs = format.columns // format.block * 4
        both = 2 if format.offset == "minimum" and format.sub_bits == 8 else 1
        return self._at(chunk, format.code_words + subs * both + which * 8)

    def _sub(self, chunk: Any, block: Any, which: int) -> Any:
        """float32x16 sub-scales (0) or sub-minima (1)."""
        format = self.format
        blocks = format.columns // format.block
        number = self._block(chunk, block)
        if format.sub_bits == 4:
            index = self._at(chunk, format.code_words + number * 4)
            return self._bytes(index, signed=False, mask=15, shift=4 * which)
        index = self._at(chunk, format.code_words + (which * blocks + number) * 4)
        return self._bytes(index, signed=which == 0)

    def _bytes(self, index: Any, signed: bool, mask: int = 0, shift: int = 0) -> Any:
        words = self.weight[self.tile, T.ramp(index, 1, 4)]
        wide = T.cast(T.reinterpret(words, dtype="int8x16" if signed else "uint8x16"), "int32x16")
        if mask:
            wide = T.bitwise_and(T.shift_right(wide, splat(i32(shift))) if shift else wide, splat(i32(mask)))
        return T.cast(wide, "float32x16")

    def _halves(self, index: Any) -> Any:
        return widen_f16(self.target, self.weight[self.tile, T.ramp(index, 1, 8)])

    def _ask_for_tables(self, chunk: Any) -> None:
        """Ask for a chunk's share of the lines with scales and offsets; codes ask for their own."""
        format = self.format
        per_record = format.columns // CHUNK
        share = -(-(format.record_words - format.code_words) // (per_record * TILE))
        for line in range(share):
            self._ask_ahead(self._at(chunk, format.code_words + (self._inside(chunk, share) + line) * TILE))

    def _ask_ahead(self, index: Any) -> None:
        if self.asks:
            ask_ahead(self.target, self.weight, self.tile_place + index, self.quick)

    @property
    def tile_place(self) -> Any:
        """Words of the matrix before the tile."""
        return self.tile * int(self.weight.shape[1])

    def chunk_place(self, chunk: Any, tiles: int = 1) -> Any:
        """Words of the matrix before a chunk of the tile, if records had what they have of each chunk together.

        Those behind the last are of the tile which is so many on.
        """
        place = self.tile_place + self.place_of(chunk)
        if tiles == 1:
            return place
        return T.Select(chunk >= self.columns // CHUNK, place + (tiles - 1) * int(self.weight.shape[1]), place)

    def place_of(self, chunk: Any) -> Any:
        """Words of the tile before a chunk, if records had what they have of each chunk together."""
        return self.format.head_words(self.columns) + chunk * self.chunk_words

    @property
    def chunk_words(self) -> int:
        """Words of a chunk, likewise."""
        return self.format.record_words * CHUNK // self.format.columns


def _moved(plane: list[Any], register: int, at: int, bits: int, to: int) -> Any:
    """The register with bit `at` of every byte at bit `to`; other bits may be anything."""
    word = plane[register]
    if at == to:
        return word
    return T.shift_right(word, splat(i32(at - to))) if at > to else T.shift_left(word, splat(i32(to - at)))


def _spread(plane: list[Any], pieces: list[tuple[int, int, int]]) -> Any:
    """Codes whose bits are the top bits of several registers: each piece pushes those before it down.

    Shifts carry bits over a byte's border, but only into the places that the next piece overwrites.
    """
    count = pieces[0][2]
    top = _bytes_of(((1 << count) - 1) << (8 - count))
    rest = _bytes_of((1 << (8 - count)) - 1)
    word = plane[pieces[0][0]]
    for register, _, _ in pieces[1:]:
        pushed = T.bitwise_and(T.shift_right(word, splat(i32(count))), rest)
        word = T.bitwise_or(pushed, T.bitwise_and(plane[register], top))
    return T.shift_right(word, splat(i32(8 - len(pieces) * count)))


def _bytes_of(byte: int) -> Any:
    """The byte in all 64 places."""
    return splat(i32(int(np.array([byte] * 4, np.uint8).view(np.int32)[0])))
