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
from llmc.targets.matrices.linear import Many, Results, Write, get, in_groups
from llmc.targets.matrices.next_panel import NextPanel
from llmc.targets.matrices.panels import PANEL, WORDS, Panel, Piece, Rows, even_panels, through_panels
from llmc.targets.narrow import functions, sums_of_pairs
from llmc.targets.target import Target
from llmc.targets.vector import dots_any_bytes, i32, imported, splat

_HALF = 16  # what a half byte is below
# With two tiles, up to so many rows go through panels of so many chunks, and more through longer ones: measured.
_FEW, _FEW_CHUNKS = 32, 4


@dataclass(frozen=True)
class _Group:
    """What is multiplied at once: so many rows with so many tiles of outputs. Measured."""

    rows: int
    tiles: int


def _group_of(target: Target) -> _Group | None:
    if dots_any_bytes(target):
        return _Group(8, 2)
    return _Group(5, 1) if target.has("avx2") else None


def many(target: Target, format: BlockFormat, columns: int) -> Many | None:
    """The products of many rows over so many columns; None where groups of unpacked weights do as well."""
    group = _group_of(target)
    if group is None or not target.knobs.panel_rows:
        return None
    whole = partial(_multiply, target, format, columns, group)
    return Many(target.knobs.panel_rows, whole, together=group.tiles)


def _multiply(
    target: Target, format: BlockFormat, columns: int, group: _Group, buffers: list[Any], tiles: list[Any],
    start: Any, count: Any, writes: list[Write],
) -> None:  # fmt: skip
    """Rows `start` to `start + count` of `buffers` (codes, scales, sums or starts, weight) times tiles.

    They are `panel_rows` at least.
    """
    *left, weight = buffers
    readers = [Tile(target, format, weight, columns, tile, quick=False, asks=False) for tile in tiles]
    fewest = target.knobs.panel_rows

    def through(chunks: int, fewest: int) -> None:
        dots = _Dots(target, readers, left[0], chunks)
        products = _Products(dots, left, start, count, group, fewest, writes)
        with imported(*functions(target, dots.top)):
            through_panels(dots.panels, products.add, products.begin, products.unpacked)

    if group.tiles == 1:
        through(PANEL, fewest)
        return
    with T.If(count <= _FEW):
        with T.Then():
            through(_FEW_CHUNKS, fewest)
        with T.Else():
            through(PANEL, max(fewest, _FEW + 1))


class _Dots:
    """Panels of some tiles, and dots of rows of codes (M, words) with them."""

    def __init__(self, target: Target, readers: list[Tile], codes: Any, most: int) -> None:
        self.target, self.codes, self.reader = target, codes, readers[0]
        top, self.signed = self.reader.top, self.reader.signed
        halved = not self.signed and top >= MIDDLE and sums_of_pairs(target, _HALF - 1) > 1
        self.pieces: list[Piece] = [_low, _high] if halved else [_as_it_is]
        self.top = _HALF - 1 if halved else top
        in_pairs = not self.signed and sums_of_pairs(target, self.top) > 1
        self.times = start_times(self.reader.zero) if self.reader.format.whole and in_pairs else 1
        chunks = even_panels(self.reader.columns, most // len(self.pieces))
        self.panels = [Panel(own, self.pieces, chunks, self.times) for own in readers]

    def starts(self, rows: Rows, numbers: list[Any], step: Any) -> list[Any]:
        """Where dots of some rows with a step begin, the same for all tiles."""
        if not self.reader.format.whole:
            return [splat(i32(0)) for _ in numbers]
        stored = [rows.total(row, step) for row in numbers]
        return [splat(s) if self.times > 1 else start_of(self.reader.start_zero, s) for s in stored]

    def of(self, starts: list[Any], row: Any, chunk: Any, at: Any, first: int, groups: int) -> list[Any]:
        """Dots of each tile: `starts`, and rows from `row` on times `groups` words of a chunk, the panels' `at`-th."""
        column = chunk * WORDS + first
        if len(self.panels) > 1:

            def words(group: Any) -> list[Any]:
                return [panel.held_word(at, first + group) for panel in self.panels]

            return add_dots_of_tiles(self.target, self.top, self.codes, row, column, groups, words, starts)
        for piece in range(len(self.pieces)):
            own, times = self.panels[0].held_words(at, first, groups, piece), self.times * _HALF**piece
            found = add_dots(
                self.target, self.top, self.codes, row, column, groups, own, starts, times, self.signed
            )  # fmt: skip
            starts = [get(found, r) for r in range(len(starts))]
        return [found]


class _Products:
    """Rows `start` to `start + count` of `left` times tiles of outputs, one panel of these after another.

    `writes` take the sums of the tiles, a group of rows at a time.
    """

    def __init__(
        self, dots: _Dots, left: list[Any], start: Any, count: Any, group: _Group, fewest: int, writes: list[Write]
    ) -> None:  # fmt: skip
        self.dots, self.start, self.count, self.group, self.writes = dots, start, count, group, writes
        self.fewest = fewest  # rows, at least
        self.knobs = dots.target.knobs
        self.rows = [Rows(panel, left, start, count, self.knobs.row_block) for panel in dots.panels]
        groups = -(-self.knobs.row_block // group.rows)
        self.ahead = [NextPanel(panel, groups, 1, group.tiles) for panel in dots.panels]

    def begin(self, first: Any, chunks: Any) -> None:
        """So many chunks from the first on are unpacked next: what is behind them is asked for from then on."""
        for ahead in self.ahead:
            ahead.begin(first + chunks, T.ceildiv(self.count, self.group.rows), chunks)

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

        in_groups(self.dots.target, self.count, group, 0, self.group.rows, fewest=self.fewest)

    def _add_chunk(self, chunk: Any, at: Any, numbers: list[Any], sums: list[Any]) -> None:
        """Add to sums of each tile what rows have with a chunk, the panels' `at`-th."""
        for ahead in self.ahead:
            ahead.ask()
        first, groups = self.rows[0], self.rows[0].step // 4
        for block in range(self.dots.panels[0].blocks):
            found = []
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
