"""Products of many rows with panels of a block format (panels.py), by vector instructions.

Weights of a panel come from memory, ready to be multiplied, so more rows share them than unpacked ones leave registers
for. Where there are thirty-two registers, and one instruction for four products, two tiles of outputs share what is
loaded of the rows as well: a core loads no more words at a time than it multiplies, and a dot waits for the one before
it, so many must be at work.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import MIDDLE, BlockFormat
from llmc.targets.matrices.block_dots import add_dots, add_dots_of_tiles, start_of, start_times
from llmc.targets.matrices.codes import CHUNK, Tile
from llmc.targets.matrices.float_dots import BITS
from llmc.targets.matrices.float_starts import added_starts
from llmc.targets.matrices.linear import Many, Results, Write, get, in_groups
from llmc.targets.matrices.next_panel import NextPanel
from llmc.targets.matrices.panels import PANEL, WORDS, Panel, Piece, Rows, even_panels, through_panels
from llmc.targets.narrow import functions, sums_of_pairs
from llmc.targets.target import Target
from llmc.targets.vector import dots_any_bytes, i32, imported, splat

_HALF = 16  # what a half byte is below
_IN_LINE = 2  # blocks of a chunk that are not looped over: LLVM mixes more, or those with minima, and spills their dots
_FEW = 32  # rows, up to which the way for few is taken, where there are two: measured


@dataclass(frozen=True)
class _Way:
    """How rows go through panels, `fewest` of them or more: measured.

    So many rows are multiplied with so many tiles of outputs at once, and panels have up to so many chunks.
    """

    rows: int
    tiles: int
    chunks: int
    fewest: int

    @property
    def floats(self) -> bool:
        """Dots are read as floats: where there are registers for it."""
        return self.tiles > 1


def _ways(target: Target, least: int) -> list[_Way]:
    """The ways of so many rows, those for fewer rows first."""
    if not target.knobs.panel_rows or not target.has("avx2"):
        return []
    fewest = max(least, target.knobs.panel_rows)
    if not dots_any_bytes(target):
        return [_Way(5, 1, PANEL, fewest)]
    few = [_Way(8, 2, 4, fewest)] if fewest <= _FEW else []
    return [*few, _Way(7, 2, PANEL, max(fewest, _FEW + 1))]


def many(target: Target, format: BlockFormat, columns: int, least: int = 1) -> Many | None:
    """The products of many rows, `least` or more, over so many columns; None where groups of rows do as well."""
    ways = _ways(target, least)
    if not ways:
        return None
    whole = partial(_multiply, target, format, columns, ways)
    starts = added_starts(target, format, columns) if ways[0].floats else None
    return Many(ways[0].fewest, whole, added=starts, together=ways[0].tiles)


def _multiply(
    target: Target, format: BlockFormat, columns: int, ways: list[_Way], buffers: list[Any], tiles: list[Any],
    start: Any, count: Any, writes: list[Write],
) -> None:  # fmt: skip
    """Rows `start` to `start + count` of `buffers` (codes, scales, sums or starts, perhaps starts for floats, weight)
    times tiles.

    They are as many as the first way asks for at least.
    """
    *left, weight = buffers
    readers = [Tile(target, format, weight, columns, tile, quick=False, asks=False) for tile in tiles]

    def through(way: _Way) -> None:
        dots = _Dots(target, readers, left, way)
        rows = [Rows(panel, left, start, count, target.knobs.row_block) for panel in dots.panels]
        products = _Products(dots, rows, way, writes)
        with imported(*functions(target)):
            through_panels(dots.panels, products.add, products.begin, products.unpacked)

    first, *others = ways
    if not others:
        through(first)
        return
    (second,) = others
    with T.If(count < second.fewest):
        with T.Then():
            through(first)
        with T.Else():
            through(second)


class _Dots:
    """Panels of some tiles, and dots of rows of `left` with them."""

    def __init__(self, target: Target, readers: list[Tile], left: list[Any], way: _Way) -> None:
        self.target, self.left, self.way, self.reader = target, left, way, readers[0]
        top, self.signed = self.reader.top, self.reader.signed
        halved = not self.signed and top >= MIDDLE and sums_of_pairs(target, _HALF - 1) > 1
        self.pieces: list[Piece] = [_low, _high] if halved else [_as_it_is]
        self.top = _HALF - 1 if halved else top
        in_pairs = not self.signed and sums_of_pairs(target, self.top) > 1
        self.times = start_times(self.reader.zero) if self.reader.format.whole and in_pairs else 1
        chunks = even_panels(self.reader.columns, way.chunks // len(self.pieces))
        self.panels = [Panel(own, self.pieces, chunks, self.times, way.floats) for own in readers]

    def starts(self, rows: Rows, numbers: list[Any], step: Any) -> list[Any]:
        """Where dots of some rows with a step begin, the same for all tiles."""
        if not self.reader.format.whole:
            return [splat(i32(BITS if self.way.floats else 0)) for _ in numbers]
        if self.way.floats:
            return [splat(self.left[3][row - rows.start, step]) for row in numbers]
        stored = [rows.total(row, step) for row in numbers]
        return [splat(s) if self.times > 1 else start_of(self.reader.start_zero, s) for s in stored]

    def of(self, starts: list[Any], row: Any, chunk: Any, at: Any, first: Any, groups: int) -> list[Any]:
        """Dots of each tile: `starts`, and rows from `row` on times `groups` words of a chunk, the panels' `at`-th."""
        column = chunk * WORDS + first
        if len(self.panels) > 1:

            def words(group: Any) -> list[Any]:
                return [panel.held_word(at, first + group) for panel in self.panels]

            return add_dots_of_tiles(self.target, self.top, self.left[0], row, column, groups, words, starts)
        for piece in range(len(self.pieces)):
            own, times = self.panels[0].held_words(at, first, groups, piece), self.times * _HALF**piece
            found = add_dots(
                self.target, self.top, self.left[0], row, column, groups, own, starts, times, self.signed
            )  # fmt: skip
            starts = [get(found, r) for r in range(len(starts))]
        return [found]


class _Products:
    """Rows of a left side, as each tile of outputs has them, times these, one panel after another.

    `writes` take the sums of the tiles, a group of rows at a time.
    """

    def __init__(self, dots: _Dots, rows: list[Rows], way: _Way, writes: list[Write]) -> None:
        self.dots, self.rows, self.way, self.writes = dots, rows, way, writes
        self.start, self.count = rows[0].start, rows[0].count
        groups = -(-dots.target.knobs.row_block // way.rows)
        self.ahead = [NextPanel(panel, groups, 1, way.tiles) for panel in dots.panels]

    def begin(self, first: Any, chunks: Any) -> None:
        """So many chunks from the first on are unpacked next: what is behind them is asked for from then on."""
        for ahead in self.ahead:
            ahead.begin(first + chunks, T.ceildiv(self.count, self.way.rows), chunks)

    def unpacked(self, number: int) -> None:
        """A chunk of one of the tiles has been unpacked."""
        self.ahead[number].ask_early()

    def add(self, first: Any, chunks: Any) -> None:
        """The products of `chunks` chunks from the first on, which the panels hold."""

        def group(row: Any, several: int) -> None:
            numbers = [self.start + row + r for r in range(several)]
            self._ask_for_results(first, numbers)
            with ExitStack() as stack:
                sums = [stack.enter_context(rows.taken(row, several)) for rows in self.rows]
                with T.serial(0, chunks) as at:
                    self._add_chunk(first + at, at, numbers, sums)
                self._write(first + chunks, numbers, sums)

        in_groups(self.dots.target, self.count, group, 0, self.way.rows, fewest=self.way.fewest)

    def _add_chunk(self, chunk: Any, at: Any, numbers: list[Any], sums: list[Any]) -> None:
        """Add to sums of each tile what rows have with a chunk, the panels' `at`-th."""
        for ahead in self.ahead:
            ahead.ask()
        blocks = self.dots.panels[0].blocks
        if not self.way.floats or (self.dots.reader.format.whole and blocks <= _IN_LINE):
            for block in range(blocks):
                self._add_block(chunk, at, block, numbers, sums)
            return
        with T.serial(0, blocks) as block:
            self._add_block(chunk, at, block, numbers, sums)

    def _add_block(self, chunk: Any, at: Any, block: Any, numbers: list[Any], sums: list[Any]) -> None:
        first, groups, found = self.rows[0], self.rows[0].step // 4, []
        for step in first.steps_of(block):
            starts = self.dots.starts(first, numbers, chunk * first.steps + step)
            found.append(self.dots.of(starts, numbers[0], chunk, at, step * groups, groups))
        for number, rows in enumerate(self.rows):
            rows.add_block(chunk, at, block, numbers, [dots[number] for dots in found], sums[number])

    def _ask_for_results(self, first: Any, numbers: list[Any]) -> None:
        """With the first panel, ask for the lines that sums will go to: they are far apart."""
        results = [write for write in self.writes if isinstance(write, Results)]
        if results:
            with T.If(first == 0), T.Then():
                for write in results:
                    for row in numbers:
                        write.ask(row)

    def _write(self, behind: Any, numbers: list[Any], sums: list[Any]) -> None:
        """With the last panel, behind which the matrix ends, write a group's sums."""
        with T.If(behind == self.dots.reader.columns // CHUNK), T.Then():
            for rows, own, write in zip(self.rows, sums, self.writes, strict=True):
                rows.scale(own, len(numbers))
                write(own, numbers[0], len(numbers))


def _as_it_is(word: Any) -> Any:
    return word


def _low(word: Any) -> Any:
    return T.bitwise_and(word, splat(i32(0x0F0F0F0F)))


def _high(word: Any) -> Any:
    return _low(T.shift_right(word, splat(i32(4))))
