"""Products of many rows with panels of a block format (panels.py), on tile registers (tiles.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE, BlockFormat
from llmc.targets.matrices import tiles
from llmc.targets.matrices.codes import Tile
from llmc.targets.matrices.linear import Write
from llmc.targets.matrices.panels import WORDS, Panel, Rows
from llmc.targets.target import Target
from llmc.targets.vector import i32

_FEW = 8  # rows of a smaller group


def multiply(
    target: Target, format: BlockFormat, columns: int, buffers: list[Any], tile: Any, start: Any, count: Any,
    write: Write,
) -> None:  # fmt: skip
    """Rows `start` to `start + count` of `buffers` (codes, scales, sums or starts, weight) times a tile."""
    *left, weight = buffers
    reader = Tile(target, format, weight, columns, tile, quick=False)
    reader.begin()
    panel = Panel(reader, [partial(_signed, reader)])
    rows = Rows(panel, left, start, count, target.knobs.row_block, over=tiles.ROWS, ahead=True)
    groups = _Groups(rows)
    rows.through_panels(groups.add)
    tiles.release()
    rows.write(write)


def _signed(reader: Tile, word: Any) -> Any:
    """A whole-number offset is taken off: bytes are signed then."""
    if not reader.format.whole:
        return word
    zero = (reader.zero + 128) % 256 - 128  # as a signed byte
    less = T.reinterpret(word, dtype="int8x64") - T.broadcast(tirx.const(zero, "int8"), 4 * TILE)
    return T.reinterpret(less, dtype="int32x16")


class _Groups:
    """Whole groups of sixteen rows, and one of those that are over."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.whole, self.over = T.floordiv(rows.count, tiles.ROWS), T.floormod(rows.count, tiles.ROWS)
        tiles.configure(rows.step, T.Select(self.whole > 0, i32(tiles.ROWS), T.cast(self.over, "int32")))

    def add(self, first: Any, chunks: Any) -> None:
        """The products of `chunks` chunks from the first on, which the panel holds."""
        with T.serial(0, self.whole) as group:
            self.rows.add(first, chunks, group * tiles.ROWS, tiles.ROWS, self._dots)
        with T.If(self.over > 0), T.Then():
            self._configure_between(self.over)
            with T.If(self.over > _FEW):
                with T.Then():
                    self.rows.add(first, chunks, self.whole * tiles.ROWS, tiles.ROWS, self._dots)
                with T.Else():
                    self.rows.add(first, chunks, self.whole * tiles.ROWS, _FEW, self._dots)
            self._configure_between(i32(tiles.ROWS))

    def _configure_between(self, rows: Any) -> None:
        """Tiles of so many rows, where there are whole groups and others by turns: it takes as long as a few dots."""
        with T.If(self.whole > 0), T.Then():
            tiles.configure(self.rows.step, rows)

    def _dots(self, chunk: Any, at: Any, step: int, row: Any, rows: int) -> Any:
        panel, words = self.rows.panel, self.rows.step // 4
        return tiles.dots(
            step, self.rows.left[0], self.rows.start + row, chunk * WORDS + step * words, panel.words,
            panel.place(at, step * words), rows, panel.format.whole,
        )  # fmt: skip
