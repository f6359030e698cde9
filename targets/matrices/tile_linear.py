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
from llmc.targets.vector import i32, registers

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
    rows = Rows(panel, left, start, count, target.knobs.row_block, over=tiles.ROWS)
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
            self._add(first, chunks, group * tiles.ROWS, tiles.ROWS)
        with T.If(self.over > 0), T.Then():
            self._configure_between(self.over)
            row = self.whole * tiles.ROWS
            with T.If(self.over > _FEW):
                with T.Then():
                    self._add(first, chunks, row, tiles.ROWS, self.rows.count - 1)
                with T.Else():
                    self._add(first, chunks, row, _FEW, self.rows.count - 1)
            self._configure_between(i32(tiles.ROWS))

    def _configure_between(self, rows: Any) -> None:
        """Tiles of so many rows, where there are whole groups and others by turns: it takes as long as a few dots."""
        with T.If(self.whole > 0), T.Then():
            tiles.configure(self.rows.step, rows)

    def _add(self, first: Any, chunks: Any, row: Any, rows: int, last: Any = None) -> None:
        """Add the products of a group, of which rows behind the `last` are none.

        Dots of a chunk are stored when those of the next are begun, which takes as long as they do; measured, storing
        each at once halves the rate.
        """
        whole = self.rows
        left_rows = [row + r if last is None else T.min(row + r, last) for r in range(rows)]
        left_rows = [whole.start + number for number in left_rows]
        dots = [registers((rows * TILE,), "int32") for _ in range(whole.steps)]
        each = whole.steps // whole.panel.blocks

        def begin(at: Any, store: bool) -> None:
            for step in range(whole.steps):
                if store:
                    tiles.store(step, dots[step])
                words = step * whole.step // 4
                tiles.multiply(
                    step, whole.left[0], whole.start + row, (first + at) * WORDS + words, whole.panel.words,
                    whole.panel.place(at, words), whole.panel.format.whole,
                )  # fmt: skip

        def add(at: Any) -> None:
            for block in range(whole.panel.blocks):
                own = dots[block * each : (block + 1) * each]
                whole.add_block(first + at, at, block, left_rows, own, acc)

        begin(0, store=False)
        with whole.taken(row, rows) as acc:
            with T.serial(1, chunks) as at:
                begin(at, store=True)
                add(at - 1)
            for step in range(whole.steps):
                tiles.store(step, dots[step])
            add(chunks - 1)
