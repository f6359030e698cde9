"""Products of many rows with panels of a block format (panels.py), on tile registers (tiles.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE, BlockFormat
from llmc.targets import tiles
from llmc.targets.matrices.codes import CHUNK, Tile
from llmc.targets.matrices.linear import Many, Results, Share, Write
from llmc.targets.matrices.next_panel import NextPanel
from llmc.targets.matrices.panels import Panel, Rows, through_panels
from llmc.targets.matrices.tiled_left import TiledLeft
from llmc.targets.target import Target
from llmc.targets.vector import i32, registers

_FEW = 8  # rows of a smaller group
_DOTS = 2  # at work at once, at least
PANEL = 16  # chunks of a panel: measured


def many(target: Target, format: BlockFormat, columns: int) -> Many:
    """The products of many rows over so many columns."""

    def copied(left: list[Any], start: Any, count: Any, share: Share) -> list[Any]:
        to = TiledLeft(format, columns, target.knobs.row_block)
        with share(T.ceildiv(count, tiles.ROWS)) as group:
            to.copy(left, start, count, group)
        return [to]

    return Many(target.knobs.tile_rows, partial(_multiply, target, format, columns), copied)


def _multiply(
    target: Target, format: BlockFormat, columns: int, operands: list[Any], outputs: list[Any], start: Any, count: Any,
    writes: list[Write],
) -> None:  # fmt: skip
    """`count` rows, copied, times a tile; what writes counts from `start` on."""
    (left, weight), (tile,), (write,) = operands, outputs, writes
    reader = Tile(target, format, weight, columns, tile, quick=False, asks=False)
    panel = Panel(reader, [partial(_signed, reader)], PANEL)
    rows = Rows(panel, [left.codes, left.scales, left.totals], start, count, target.knobs.row_block, over=tiles.ROWS)
    together = max(1, _DOTS // rows.steps)
    ahead = NextPanel(panel, -(-target.knobs.row_block // tiles.ROWS), together)
    groups = _Groups(rows, left, ahead, write)
    through_panels([panel], groups.add, groups.begin, lambda _: ahead.ask_early())
    tiles.release()


def _signed(reader: Tile, word: Any) -> Any:
    """A whole-number offset is taken off: bytes are signed then."""
    if not reader.format.whole:
        return word
    zero = (reader.zero + 128) % 256 - 128  # as a signed byte
    less = T.reinterpret(word, dtype="int8x64") - T.broadcast(tirx.const(zero, "int8"), 4 * TILE)
    return T.reinterpret(less, dtype="int32x16")


class _Groups:
    """Whole groups of sixteen rows, and one of those that are over."""

    def __init__(self, rows: Rows, left: TiledLeft, ahead: NextPanel, write: Write) -> None:
        self.rows, self.left, self.ahead, self.write = rows, left, ahead, write
        self.whole, self.over = T.floordiv(rows.count, tiles.ROWS), T.floormod(rows.count, tiles.ROWS)
        tiles.configure(rows.step, T.Select(self.whole > 0, i32(tiles.ROWS), T.cast(self.over, "int32")))

    def begin(self, first: Any, chunks: Any) -> None:
        """So many chunks from the first on are unpacked next: what is behind them is asked for from then on."""
        self.ahead.begin(first + chunks, T.ceildiv(self.rows.count, tiles.ROWS), chunks)

    def add(self, first: Any, chunks: Any) -> None:
        """The products of `chunks` chunks from the first on, which the panel holds."""
        with T.serial(0, self.whole) as group:
            self._add(first, chunks, group, tiles.ROWS, tiles.ROWS)
        with T.If(self.over > 0), T.Then():
            self._configure_between(self.over)
            with T.If(self.over > _FEW):
                with T.Then():
                    self._add(first, chunks, self.whole, tiles.ROWS, self.over)
                with T.Else():
                    self._add(first, chunks, self.whole, _FEW, self.over)
            self._configure_between(i32(tiles.ROWS))

    def _configure_between(self, rows: Any) -> None:
        """Tiles of so many rows, where there are whole groups and others by turns: it takes as long as a few dots."""
        with T.If(self.whole > 0), T.Then():
            tiles.configure(self.rows.step, rows)

    def _add(self, first: Any, chunks: Any, number: Any, rows: int, count: Any) -> None:
        """Add the products of `count` rows of a group, which has room for `rows`.

        With the first of them, ask for where their sums will go; with the last, write these. They go to lines far
        apart, and as many stores as a tile of outputs has rows keep the next ones waiting.
        """
        at = number * tiles.ROWS
        if isinstance(self.write, Results):
            with T.If(first == 0), T.Then():
                for place in range(rows):
                    self.write.ask(self.rows.start + T.min(at + place, self.rows.count - 1))
        group = _Group(self.rows, self.left, self.ahead, number, rows, first)
        together = self.ahead.together
        with self.rows.taken(at, rows) as acc:
            if together == 1:
                group.add(chunks, 1, acc)
            else:
                with T.If(chunks >= together), T.Then():
                    group.add(T.floordiv(chunks, together), together, acc)
                with T.serial(0, T.floormod(chunks, together)) as over:
                    group.add_one(chunks - 1 - over, acc)
        with T.If(first + chunks == self.rows.panel.reader.columns // CHUNK), T.Then():
            self.rows.write(self.write, at, count)


class _Group:
    """`count` rows of a group of the left that are multiplied with the panel, whose first chunk is the `first`."""

    def __init__(
        self, rows: Rows, left: TiledLeft, ahead: NextPanel, number: Any, count: int, first: Any
    ) -> None:  # fmt: skip
        self.rows, self.left, self.ahead, self.number, self.first = rows, left, ahead, number, first
        self.left_rows = [(number, place) for place in range(count)]
        self.dots = [registers((count * TILE,), "int32") for _ in range(max(rows.steps, _DOTS))]

    def add(self, turns: Any, together: int, acc: Any) -> None:
        """The products of so many turns of some chunks, from the first on.

        Dots of a turn are stored when those of the next are begun, for a store waits for all of its dots' latency;
        measured, it is up to 1.6 times as fast as storing each at once.
        """
        for inside in range(together):
            self._begin(inside, inside, store=False)
        with T.serial(1, turns) as turn:
            self.ahead.ask()
            for inside in range(together):
                self._begin(turn * together + inside, inside, store=True)
            for inside in range(together):
                self._finish((turn - 1) * together + inside, inside, acc)
        for inside in range(together):
            self._store(inside)
        for inside in range(together):
            self._finish((turns - 1) * together + inside, inside, acc)

    def add_one(self, at: Any, acc: Any) -> None:
        """The products of the panel's `at`-th chunk."""
        self._begin(at, 0, store=False)
        self._store(0)
        self._finish(at, 0, acc)

    def _begin(self, at: Any, inside: int, store: bool) -> None:
        """Make the dots of a chunk, as a turn's `inside`-th; store those of the turn before."""
        rows, panel = self.rows, self.rows.panel
        for step in range(rows.steps):
            number, words = inside * rows.steps + step, step * rows.step // 4
            if store:
                tiles.store(number, self.dots[number])
            codes = self.left.codes_of(self.number, (self.first + at) * rows.steps + step)
            tiles.multiply(
                number, self.left.codes, codes, panel.words, panel.place(at, words), rows.step, panel.format.whole
            )

    def _store(self, inside: int) -> None:
        for number in range(inside * self.rows.steps, (inside + 1) * self.rows.steps):
            tiles.store(number, self.dots[number])

    def _finish(self, at: Any, inside: int, acc: Any) -> None:
        """Add what is stored of a chunk."""
        each = self.rows.steps // self.rows.panel.blocks
        for block in range(self.rows.panel.blocks):
            first = inside * self.rows.steps + block * each
            self.rows.add_block(self.first + at, at, block, self.left_rows, self.dots[first : first + each], acc)
