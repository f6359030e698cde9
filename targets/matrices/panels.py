"""Linear layers over block formats for many rows: a tile of weights is unpacked once for all of them.

Of sixteen outputs a panel of columns is unpacked, into bytes that stay in the first-level cache, and all rows of a
block go through it; what a row has so far stands beside it. Each sum is made in the order of block_linear.py, so it has
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.matrices.block_sums import add_sums, first_total, step_of
from llmc.targets.matrices.codes import CHUNK, Tile, Words
from llmc.targets.matrices.float_dots import less_of
from llmc.targets.matrices.linear import Write, get, put
from llmc.targets.vector import f32, held, lanes, registers, splat

PANEL = 10  # chunks of a panel, at most: measured
WORDS = CHUNK // 4  # of a row of a chunk

# What of a word of weights, four unsigned bytes, a panel holds: int32x16 -> int32x16.
Piece = Callable[[Any], Any]


def even_panels(columns: int, most: int) -> int:
    """Chunks of a panel, at most so many, where the last one is to have about as many as the others.

    >>> even_panels(576, 10), even_panels(704, 10)
    (9, 6)
    """
    chunks = columns // CHUNK
    return -(-chunks // -(-chunks // most))


class Panel:
    """Pieces of the bytes of up to `chunks` chunks of a tile, with their scales and offsets as float32.

    Scales are for dots that are taken so many `times`, a power of two; offsets are then none. `floats`: for dots that
    are read as such (float_dots.py).
    """

    def __init__(
        self, reader: Tile, pieces: list[Piece], chunks: int, times: int = 1, floats: bool = False
    ) -> None:  # fmt: skip
        self.reader, self.format, self.times = reader, reader.format, times
        self.pieces, self.chunks = pieces, chunks
        self.blocks = CHUNK // self.format.block  # of a chunk
        self.words = registers((len(pieces) * chunks * WORDS * TILE,), "int32")
        self.scales = registers((chunks * self.blocks * TILE,), "float32")
        self.less = registers((chunks * self.blocks * TILE,), "float32") if floats else None
        self.offsets = None if self.format.whole else registers((chunks * self.blocks * TILE,), "float32")

    def unpack(self, chunk: Any, at: Any) -> None:
        """A chunk of the tile, as the panel's `at`-th."""
        for group, word in self.reader.multiplied(chunk):
            for number, piece in enumerate(self.pieces):
                T.buffer_store(self.words, piece(word), [lanes(self.place(at, group, number))])
        for block in range(self.blocks):
            scale = held(self.reader.scale(chunk, block))
            place = self._table(at, block)
            T.buffer_store(self.scales, scale if self.times == 1 else scale * splat(f32(1 / self.times)), [place])
            if self.less is not None:
                T.buffer_store(self.less, less_of(scale), [place])
            if self.offsets is not None:
                T.buffer_store(self.offsets, self.reader.offset(chunk, block, scale), [place])

    def place(self, at: Any, group: Any, piece: int = 0) -> Any:
        """Where a piece of four columns of the `at`-th chunk begins, sixteen words."""
        return ((piece * self.chunks + at) * WORDS + group) * TILE

    def held_words(self, at: Any, first: Any, groups: int, piece: int) -> Words:
        """The numbers, and a piece, of `groups` groups of four columns of the `at`-th chunk, from the first on."""
        for group in range(groups):
            yield group, self.held_word(at, first + group, piece)

    def held_word(self, at: Any, group: Any, piece: int = 0) -> Any:
        """A piece of a group of four columns of the `at`-th chunk."""
        return held(self.words[lanes(self.place(at, group, piece))], "int32")

    def _table(self, at: Any, block: Any) -> Any:
        return lanes((at * self.blocks + block) * TILE)

    def tables(self, at: Any, block: Any) -> tuple[Any, Any, Any]:
        """Scale, offset and `less`, float32x16, of a block of the `at`-th chunk; None: there is no such."""
        place = self._table(at, block)
        offset, less = (None if table is None else table[place] for table in (self.offsets, self.less))
        return self.scales[place], offset, less


class Rows:
    """Rows `start` to `start + count` of `left` (codes, scales, sums or starts), and what they have so far.

    There is room for `most` of them, and for `over` that a group may have above the count.
    """

    def __init__(self, panel: Panel, left: list[Any], start: Any, count: Any, most: int, over: int = 0) -> None:
        self.panel, self.left, self.start, self.count = panel, left, start, count
        self.sums = registers(((most + over) * TILE,), "float32")
        self.step, self.steps = step_of(panel.format), CHUNK // step_of(panel.format)
        with T.serial(0, count) as row:
            T.buffer_store(self.sums, splat(f32(0)), [lanes(row * TILE)])

    @contextmanager
    def taken(self, row: Any, rows: int) -> Iterator[Any]:
        """The sums of a group, in registers, to be added to."""
        acc = registers((rows * TILE,), "float32")
        for r in range(rows):
            put(acc, r, self.sums[lanes((row + r) * TILE)])
        yield acc
        for r in range(rows):
            T.buffer_store(self.sums, get(acc, r), [lanes((row + r) * TILE)])

    def steps_of(self, block: Any) -> list[Any]:
        """The steps of a chunk that are of a block."""
        each = self.steps // self.panel.blocks
        return [block * each + step for step in range(each)]

    def add_block(self, chunk: Any, at: Any, block: Any, left_rows: list[Any], dots: list[Any], acc: Any) -> None:
        """Add dots of each step of a block of the panel's `at`-th chunk, with rows of the left, to sums."""
        scale, offset, less = self.panel.tables(at, block)
        for r, row in enumerate(left_rows):
            scales, totals = self._of_row(row, chunk * self.steps, self.steps_of(block))
            put(acc, r, add_sums(get(acc, r), [get(dot, r) for dot in dots], scales, scale, offset, totals, less))

    def _of_row(self, row: Any, first: Any, steps: list[Any]) -> tuple[list[Any], list[Any] | None]:
        """Scales and totals of a row in some steps from the first on."""
        scales = self.left[1]
        found = [scales[row, T.floordiv((first + step) * self.step, self.panel.format.left_block)] for step in steps]
        return found, None if self.panel.offsets is None else [self.total(row, first + step) for step in steps]

    def total(self, row: Any, step: Any) -> Any:
        """The total of a row of the left in a step, counted from the first column."""
        return self.left[2][row, first_total(self.panel.format, self.panel.reader.columns) + step]

    def scale(self, sums: Any, rows: int) -> None:
        """Multiply the sums of rows, all columns', by what their outputs have as a scale, if there is one."""
        row_scale = self.panel.reader.row_scale()
        if row_scale is not None:
            for r in range(rows):
                put(sums, r, get(sums, r) * row_scale)

    def write(self, write: Write, first: Any, count: Any) -> None:
        """Give the sums of `count` rows from the first on to `write`, one at a time."""
        with T.serial(0, count) as number:
            row = first + number
            acc = registers((TILE,), "float32")
            put(acc, 0, self.sums[lanes(row * TILE)])
            self.scale(acc, 1)
            write(acc, self.start + row, 1)


def through_panels(
    panels: list[Panel], add: Callable[[Any, Any], None], begin: Callable[[Any, Any], None] | None = None,
    unpacked: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    """Unpack one panel of each tile after another, and `add(first chunk, chunks)` for each.

    Before they are unpacked `begin(first chunk, chunks)`, and behind each chunk of the tiles' n-th `unpacked(n)`, where
    there are such.
    """
    most, chunks = panels[0].chunks, panels[0].reader.columns // CHUNK
    with T.serial(0, -(-chunks // most)) as number:
        first = number * most
        here = T.min(chunks - first, most)
        if begin is not None:
            begin(first, here)
        for tile, panel in enumerate(panels):
            with T.serial(0, here) as at:
                panel.unpack(first + at, at)
                if unpacked is not None:
                    unpacked(tile)
        add(first, here)
