"""Products of rows in bfloat16 with tiles of a block format, on tile registers: weights are unpacked (unpacked.py).

A sum goes over all columns in a tile register, a single row's too, so that a row has the same bits whatever is beside
it. Few rows go through a tile of weights as it is unpacked. Of many a block goes through panels of four tiles of
weights, and a panel is unpacked while rows go through the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE, BlockFormat
from llmc.targets import tiles
from llmc.targets.matrices.codes import Tile
from llmc.targets.matrices.linear import Write, put
from llmc.targets.matrices.unpacked import PAIRS, pairs
from llmc.targets.target import Target
from llmc.targets.vector import lanes, prefetch, registers

FEW = tiles.SUMS * tiles.ROWS  # rows whose sums fit into tiles
BLOCK = 128  # rows of a block, when there are more: measured
TOGETHER = tiles.SUMS  # tiles of weights that a block of rows goes through at once
# Chunks of a panel, the best first: two panels nearly fit into the first-level cache, and in sums rarely change places.
_PANELS = (4, 3, 5, 2, 1)
_STEPS = PAIRS // tiles.BF16_PAIRS  # tile registers that a chunk of weights fills
_STEP = tiles.BF16_PAIRS * TILE  # words of one
_SUMS = tiles.ROWS * TILE  # numbers of a tile of sums

Tiles = Callable[[Any], Any]  # a number -> the tile of outputs
Row = Callable[[Any], None]  # emits what is done with a row of a block


@dataclass(frozen=True)
class Matrix:
    """A packed weight (T, words) over so many pairs of columns, whole chunks of them."""

    target: Target
    format: BlockFormat
    weight: Any
    pairs: int

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.pairs // PAIRS

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return int(self.weight.shape[0])

    def tile(self, number: Any, asks: bool = False) -> Tile:
        """What reads a tile of outputs; `asks`: and asks for what comes after it."""
        return Tile(self.target, self.format, self.weight, 2 * self.pairs, number, quick=False, asks=asks)


def few(matrix: Matrix, x: Any, rows: Any, tile: Any, write: Write) -> None:
    """All rows of x (M, pairs), at most FEW, times a tile of outputs."""
    for groups in range(1, tiles.SUMS + 1):
        with T.If(T.ceildiv(rows, tiles.ROWS) == groups), T.Then():
            _few(matrix, x, rows, groups, tile, write)


def _few(matrix: Matrix, x: Any, rows: Any, groups: int, tile: Any, write: Write) -> None:
    """The same in so many groups of sixteen rows; the last one has rows of the one before where there are too few."""
    height = T.min(T.cast(rows, "int32"), tiles.ROWS)
    starts = [T.min(rows - tiles.ROWS, group * tiles.ROWS) if groups > 1 else 0 for group in range(groups)]
    reader = matrix.tile(tile, asks=True)
    words = registers((2 * _STEPS * _STEP,), "int32")  # of a chunk and of the one before
    sums = registers((groups * _SUMS,), "float32")

    def place(chunk: Any) -> Any:
        return T.floormod(chunk, 2) * (_STEPS * _STEP)

    def unpack(chunk: Any) -> None:
        for line, word in enumerate(pairs(reader, chunk)):
            T.buffer_store(words, word, [lanes(place(chunk) + line * TILE)])

    def multiply(chunk: Any) -> None:
        for step in range(_STEPS):
            tiles.load_right(step, words, place(chunk) + step * _STEP, TILE)
            for group, start in enumerate(starts):
                column = chunk * PAIRS + step * tiles.BF16_PAIRS
                tiles.load_left(group, x, start * matrix.pairs + column, matrix.pairs)
                tiles.add_products(group, group, step)

    tiles.configure_pairs(height, tiles.BF16_PAIRS)
    reader.begin()
    for group in range(groups):
        tiles.clear_sums(group)
    unpack(0)
    with T.serial(1, matrix.chunks) as chunk:
        unpack(chunk)
        multiply(chunk - 1)
    multiply(matrix.chunks - 1)
    for group in range(groups):
        tiles.store_sums(group, sums, group * _SUMS, TILE)
    tiles.release()
    for group, start in enumerate(starts):
        with T.serial(0, height) as row:
            write(_scaled(reader, sums[lanes(group * _SUMS + row * TILE)]), start + row, 1)


def _scaled(reader: Tile, sums: Any) -> Any:
    """Sums of a row, in a register, times the scales that rows of weights have, if they have any."""
    acc, scale = registers((TILE,), "float32"), reader.row_scale()
    put(acc, 0, sums if scale is None else sums * scale)
    return acc


class Left:
    """Up to BLOCK rows of pairs, copied: what a group of sixteen has of a step stands together."""

    def __init__(self, matrix: Matrix) -> None:
        self.steps = matrix.chunks * _STEPS
        self.buffer = T.alloc_buffer((BLOCK * matrix.pairs,), "int32")

    def place(self, group: Any, step: Any) -> Any:
        """Where a step of a group begins."""
        return (group * self.steps + step) * (tiles.ROWS * tiles.BF16_PAIRS)

    def copy(self, x: Any, start: Any, count: Any, group: Any) -> None:
        """A group of `count` rows of x from `start` on; behind the last row that one again."""
        with T.serial(0, tiles.ROWS) as row, T.serial(0, self.steps) as step:
            own = start + T.min(group * tiles.ROWS + row, count - 1)
            to = self.place(group, step) + row * tiles.BF16_PAIRS
            T.buffer_store(self.buffer, x[own, lanes(step * tiles.BF16_PAIRS)], [lanes(to)])


class Many:
    """`count` rows, at most BLOCK, times TOGETHER tiles of outputs: `own(number)` of them, with a number below that.

    `following(number)`: what most likely comes next in this thread, whose first words are asked for.
    """

    def __init__(self, matrix: Matrix, left: Left, count: Any, own: Tiles, following: Tiles) -> None:
        self.matrix, self.left, self.count, self.own, self.following = matrix, left, count, own, following
        self.panel = next(chunks for chunks in _PANELS if matrix.chunks % chunks == 0)
        self.groups = T.ceildiv(count, tiles.ROWS)
        self.words = registers((2 * TOGETHER * self.panel * _STEPS * _STEP,), "int32")  # panels (tiles, chunks, lines)
        self.sums = registers((BLOCK * TOGETHER * TILE,), "float32")  # (groups, tiles, rows, 16)

    def multiply(self, ask: Row, finish: Row) -> None:
        """Make all sums. With a row's first ones `ask(row)` asks for where results go; `finish(row)` has the last."""
        panels, units = self.matrix.chunks // self.panel, TOGETHER * self.panel
        each = -(-units // (BLOCK // tiles.ROWS))  # chunks that are unpacked as a group goes through a panel
        tiles.configure_pairs(tiles.ROWS, tiles.BF16_PAIRS)
        with T.serial(0, units) as unit:
            _all(self._unpack(0, unit))
        with T.serial(0, panels) as panel, T.If(panel + 1 < panels):
            with T.Then():
                with T.serial(0, self.groups) as group:
                    own = [T.min(group * each + number, units - 1) for number in range(each)]
                    self._group(panel, group, [self._unpack(panel + 1, unit) for unit in own], ask)
                with T.serial(0, T.max(units - self.groups * each, 0)) as over:
                    _all(self._unpack(panel + 1, self.groups * each + over))
            with T.Else(), T.serial(0, self.groups) as group:
                self._group(panel, group, [], ask)
                first = group * tiles.ROWS
                with T.serial(0, T.min(self.count - first, tiles.ROWS)) as row:
                    finish(first + row)
        tiles.release()

    def row(self, row: Any, number: Any) -> Any:
        """The sums of a row and one of the tiles."""
        group, inside = T.floordiv(row, tiles.ROWS), T.floormod(row, tiles.ROWS)
        return _scaled(
            self.matrix.tile(self.own(number)), self.sums[lanes((group * TOGETHER + number) * _SUMS + inside * TILE)]
        )

    def _unpack(self, panel: Any, unit: Any) -> Iterator[None]:
        """Unpack one chunk of one tile of a panel, a line at a time, and ask for what the panel after it has there."""
        number, at = T.floordiv(unit, self.panel), T.floormod(unit, self.panel)
        chunk = panel * self.panel + at
        reader = self.matrix.tile(self.own(number))
        after = chunk + self.panel
        over = after >= self.matrix.chunks
        asked = T.Select(over, self.following(number), self.own(number))
        first = self.matrix.tile(asked).chunk_place(T.Select(over, after - self.matrix.chunks, after))
        asked_lines = -(-reader.chunk_words // TILE)
        for line, word in enumerate(pairs(reader, chunk)):
            T.buffer_store(self.words, word, [lanes(self._place(panel, number, at) + line * TILE)])
            if line < asked_lines:
                prefetch(self.matrix.weight.access_ptr("r", offset=first + line * TILE), far=True)
            yield

    def _place(self, panel: Any, number: Any, at: Any) -> Any:
        """Where a chunk of a panel begins."""
        return ((T.floormod(panel, 2) * TOGETHER + number) * self.panel + at) * (_STEPS * _STEP)

    def _group(self, panel: Any, group: Any, unpacking: list[Iterator[None]], ask: Row) -> None:
        """A group of rows goes through a panel, and lines are unpacked in turn."""
        place = group * TOGETHER * _SUMS
        with T.If(panel == 0):
            with T.Then():
                for number in range(TOGETHER):
                    tiles.clear_sums(number)
                with T.serial(0, tiles.ROWS) as row:
                    ask(T.min(group * tiles.ROWS + row, self.count - 1))
            with T.Else():
                for number in range(TOGETHER):
                    tiles.load_sums(number, self.sums, place + number * _SUMS, TILE)
        steps, lines = self.panel * _STEPS, chain.from_iterable(unpacking)
        each = -(-len(unpacking) * PAIRS // steps)
        if unpacking:
            for step in range(steps):
                self._step(panel, group, step)
                _all(islice(lines, each))
        else:
            with T.serial(0, steps) as step:
                self._step(panel, group, step)
        for number in range(TOGETHER):
            tiles.store_sums(number, self.sums, place + number * _SUMS, TILE)

    def _step(self, panel: Any, group: Any, step: Any) -> None:
        tiles.load_left(
            0, self.left.buffer, self.left.place(group, panel * self.panel * _STEPS + step), tiles.BF16_PAIRS
        )
        for number in range(TOGETHER):
            tiles.load_right(number, self.words, self._place(panel, number, 0) + step * _STEP, TILE)
            tiles.add_products(number, 0, number)


def _all(emitted: Iterator[None]) -> None:
    for _ in emitted:
        pass
