"""Linear layers over block formats on tile registers (tiles.py).

Of a tile of sixteen outputs a panel of columns is unpacked once, into bytes that stay in the first-level cache, and all
groups of sixteen rows of a block go through it; what a row has so far stands beside it. Each sum is made in the order
of block_linear.py, so it has the same bits.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, TILE, BlockFormat
from llmc.targets.matrices import tiles
from llmc.targets.matrices.block_sums import add_sums, first_total, step_of
from llmc.targets.matrices.codes import CHUNK, Tile
from llmc.targets.matrices.linear import Write, get, put
from llmc.targets.target import Target
from llmc.targets.vector import f32, held, i32, lanes, registers, splat

PANEL = 8  # chunks of a panel
_WORDS = CHUNK // 4  # of a row of a chunk
_FEW = 8  # rows of a smaller group


class Panel:
    """The bytes of up to PANEL chunks of a tile, with their scales and offsets as float32."""

    def __init__(self, reader: Tile) -> None:
        self.reader, self.format = reader, reader.format
        self.blocks = CHUNK // self.format.block  # of a chunk
        self.words = registers((PANEL * _WORDS * TILE,), "int32")
        self.scales = registers((PANEL * self.blocks * TILE,), "float32")
        self.offsets = None if self.format.whole else registers((PANEL * self.blocks * TILE,), "float32")

    def unpack(self, chunk: Any, at: Any) -> None:
        """A chunk of the tile, as the panel's `at`-th. A whole-number offset is taken off: bytes are signed then."""
        for group, word in enumerate(self.reader.values(chunk)):
            T.buffer_store(self.words, self._signed(word), [lanes((at * _WORDS + group) * TILE)])
        for block in range(self.blocks):
            scale = held(self.reader.scale(chunk, block))
            place = self._place(at, block)
            T.buffer_store(self.scales, scale, [place])
            if self.offsets is not None:
                T.buffer_store(self.offsets, self.reader.offset(chunk, block, scale), [place])

    def _signed(self, word: Any) -> Any:
        if not self.format.whole:
            return word
        zero = (self.reader.zero + 128) % 256 - 128  # as a signed byte
        less = T.reinterpret(word, dtype="int8x64") - T.broadcast(tirx.const(zero, "int8"), 4 * TILE)
        return T.reinterpret(less, dtype="int32x16")

    def _place(self, at: Any, block: int) -> Any:
        return lanes((at * self.blocks + block) * TILE)

    def tables(self, at: Any, block: int) -> tuple[Any, Any]:
        """Scale and offset, float32x16, of a block of the `at`-th chunk."""
        place = self._place(at, block)
        return self.scales[place], None if self.offsets is None else self.offsets[place]


class Multiplication:
    """Rows `start` to `start + count` of `left`, at most `most`, times a tile of outputs.

    Whole groups of sixteen rows, and one of those that are over.
    """

    def __init__(self, panel: Panel, left: list[Any], start: Any, count: Any, most: int) -> None:
        self.panel, self.left, self.start, self.count = panel, left, start, count
        self.step, self.steps = step_of(panel.format), CHUNK // step_of(panel.format)
        self.whole, self.over = T.floordiv(count, tiles.ROWS), T.floormod(count, tiles.ROWS)
        self.sums = registers(((most + tiles.ROWS) * TILE,), "float32")  # of all rows so far; a group may be over
        with T.serial(0, count) as row:
            T.buffer_store(self.sums, splat(f32(0)), [lanes(row * TILE)])
        tiles.configure(self.step, T.Select(self.whole > 0, i32(tiles.ROWS), T.cast(self.over, "int32")))

    def add_panel(self, first: Any, chunks: Any) -> None:
        """Add the products of `chunks` chunks from the first on."""
        with T.serial(0, chunks) as at:
            self.panel.unpack(first + at, at)
        with T.serial(0, self.whole) as group:
            self._add(first, chunks, group * tiles.ROWS, tiles.ROWS)
        with T.If(self.over > 0), T.Then():
            self._configure_between(self.over)
            with T.If(self.over > _FEW):
                with T.Then():
                    self._add(first, chunks, self.whole * tiles.ROWS, tiles.ROWS)
                with T.Else():
                    self._add(first, chunks, self.whole * tiles.ROWS, _FEW)
            self._configure_between(i32(tiles.ROWS))

    def _configure_between(self, rows: Any) -> None:
        """Tiles of so many rows, where there are whole groups and others by turns: it takes as long as a few dots."""
        with T.If(self.whole > 0), T.Then():
            tiles.configure(self.step, rows)

    def _add(self, first: Any, chunks: Any, row: Any, rows: int) -> None:
        """The panel's products with a group of rows, of which the last may not be there."""
        acc = registers((rows * TILE,), "float32")
        for r in range(rows):
            put(acc, r, self.sums[lanes((row + r) * TILE)])
        with T.serial(0, chunks) as at:
            dots = [self._dots(first + at, at, step, row, rows) for step in range(self.steps)]
            for block in range(self.panel.blocks):
                scale, offset = self.panel.tables(at, block)
                each = self.steps // self.panel.blocks
                own = range(block * each, (block + 1) * each)
                for r in range(rows):
                    left_row = self.start + T.min(row + r, self.count - 1)
                    scales, totals = self._of_row(left_row, (first + at) * self.steps, own)
                    put(acc, r, add_sums(get(acc, r), [get(dots[s], r) for s in own], scales, scale, offset, totals))
        for r in range(rows):
            T.buffer_store(self.sums, get(acc, r), [lanes((row + r) * TILE)])

    def _dots(self, chunk: Any, at: Any, step: int, row: Any, rows: int) -> Any:
        words = self.step // 4
        return tiles.dots(
            step, self.left[0], self.start + row, chunk * _WORDS + step * words, self.panel.words,
            (at * _WORDS + step * words) * TILE, rows, self.panel.format.whole,
        )  # fmt: skip

    def _of_row(self, row: Any, first: Any, steps: range) -> tuple[list[Any], list[Any] | None]:
        """Scales and totals of a row in some steps from the first on."""
        _, scales, totals = self.left
        found = [scales[row, T.floordiv((first + step) * self.step, BLOCK)] for step in steps]
        if self.panel.offsets is None:
            return found, None
        at = first_total(self.panel.format, self.panel.reader.columns) + first
        return found, [totals[row, at + step] for step in steps]


def multiply(
    target: Target, format: BlockFormat, columns: int, buffers: list[Any], tile: Any, start: Any, count: Any,
    write: Write,
) -> None:  # fmt: skip
    """Rows `start` to `start + count` of `buffers` (codes, scales, sums or starts, weight) times a tile."""
    *left, weight = buffers
    reader = Tile(target, format, weight, columns, tile, quick=False)
    reader.begin()
    chunks = columns // CHUNK
    rows = Multiplication(Panel(reader), left, start, count, target.knobs.row_block)
    with T.serial(0, -(-chunks // PANEL)) as panel:
        rows.add_panel(panel * PANEL, T.min(chunks - panel * PANEL, PANEL))
    tiles.release()
    with T.serial(0, count) as row:
        acc = registers((TILE,), "float32")
        put(acc, 0, rows.sums[lanes(row * TILE)])
        row_scale = reader.row_scale()
        if row_scale is not None:
            put(acc, 0, get(acc, 0) * row_scale)
        write(acc, start + row, 1)
