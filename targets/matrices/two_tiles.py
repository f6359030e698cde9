"""Products of a few rows with a block format: two tiles of outputs at once, their weights unpacked in registers.

With one tile a core loads about as many words at a time as it multiplies, and the loads keep dots waiting: here what is
loaded of the rows is multiplied twice. Sums stand in the first-level cache, so that registers are free for dots. Each
sum is made in the order of block_linear.py, so it has the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, MIDDLE, TILE, BlockFormat
from llmc.targets.matrices.block_sums import add_sums, first_total, step_of
from llmc.targets.matrices.codes import CHUNK, Tile
from llmc.targets.matrices.float_dots import BITS, less_of
from llmc.targets.matrices.float_starts import added_starts
from llmc.targets.matrices.linear import Many, Write, get, in_groups, put
from llmc.targets.target import Target
from llmc.targets.vector import (
    dot4,
    dots_any_bytes,
    f32,
    held,
    i32,
    imported,
    lanes,
    prefetch,
    registers,
    splat,
)

MOST = 10  # rows of a group: measured; with twelve LLVM spills
_BITS = 4  # of the first plane: with others two tiles gain nothing, or lose
_UNITS = CHUNK // BLOCK

# The same number, which LLVM knows nothing of: it unrolls loops whose turns it can count, mixes them, and spills dots.
_UNKNOWN = """
define i64 @llmc_unknown(i64 %x) alwaysinline {
  %r = call i64 asm "", "=r,0"(i64 %x)
  ret i64 %r
}
"""


def few(target: Target, format: BlockFormat, columns: int) -> Many | None:
    """The products of a few rows over so many columns; None where groups of one tile do as well."""
    least, tile = target.knobs.pair_rows, Tile(target, format, None, columns, 0, quick=False)
    known = tile.by_registers and format.planes[0] == _BITS and step_of(format) >= BLOCK
    looked_up = tile.table is not None and not target.permutes_bytes
    if not least or not dots_any_bytes(target) or not known or looked_up:
        return None
    whole = partial(_multiply, target, format, columns, min(least, MOST))
    return Many(least, whole, added=added_starts(target, format, columns), together=2)


def _multiply(
    target: Target, format: BlockFormat, columns: int, fewest: int, buffers: list[Any], tiles: list[Any], start: Any,
    count: Any, writes: list[Write],
) -> None:  # fmt: skip
    """Rows `start` to `start + count` of `buffers` (codes, scales, sums or starts, perhaps starts for floats, weight)
    times two tiles.
    """
    *left, weight = buffers
    with imported(_UNKNOWN):
        own = [Tile(target, format, weight, columns, tile, quick=False, asks=False) for tile in tiles]
        two = _TwoTiles(own, left, start)

        def group(row: Any, rows: int) -> None:
            two.multiply(start + row, [lanes((row + r) * TILE) for r in range(rows)], writes)

        in_groups(target, count, group, 0, MOST, fewest)


class _TwoTiles:
    """Two tiles, and groups of rows of `left` that are multiplied with them; starts for floats: from row `start`."""

    def __init__(self, tiles: list[Tile], left: list[Any], start: Any) -> None:
        self.tiles, self.left, self.start = tiles, left, start
        self.target, self.format, self.columns = tiles[0].target, tiles[0].format, tiles[0].columns
        self.top, self.step = tiles[0].top, step_of(self.format)
        # Indexed by a row's number, which LLVM does not know: it would have some in registers, and dots on the stack.
        self.sums = [registers((self.target.knobs.row_block * TILE,), "float32") for _ in tiles]
        self.turns = registers((1,), "int64")  # for a unit: each has a register of codes
        T.buffer_store(self.turns, T.call_extern("int64", "llmc_unknown", T.int64(_BITS)), [0])
        self.ahead = _Ahead(tiles)

    def multiply(self, row: Any, places: list[Any], writes: list[Write]) -> None:
        """All columns of rows from `row` on, whose sums have these places."""
        for sums in self.sums:
            for place in places:
                T.buffer_store(sums, splat(f32(0)), [place])
        self.ahead.begin()
        with T.serial(0, self.columns // CHUNK) as chunk:
            self.ahead.begin_chunk(chunk)
            with T.serial(0, CHUNK // self.format.block) as block:
                for step in range(self.format.block // self.step):
                    self._add_step(chunk, block, step, row, places)
        for tile, sums, write in zip(self.tiles, self.sums, writes, strict=True):
            found, scale = registers((len(places) * TILE,), "float32"), tile.row_scale()
            for r, place in enumerate(places):
                put(found, r, sums[place] if scale is None else sums[place] * scale)
            write(found, row, len(places))

    def _add_step(self, chunk: Any, block: Any, step: int, row: Any, places: list[Any]) -> None:
        """Add to sums the products of one of the steps of a block of a chunk."""
        steps = self.format.block // self.step
        inside = block * steps + step
        number = chunk * (CHUNK // self.step) + inside  # from the first column on
        dots = self._dots(chunk, inside, number, row, len(places))
        column, total = T.floordiv(number * self.step, self.format.left_block), first_total(self.format, self.columns)
        _, scales, totals = self.left[:3]
        for tile, own, sums in zip(self.tiles, dots, self.sums, strict=True):
            scale = held(tile.scale(chunk, block))
            less, offset, there = held(less_of(scale)), None, None
            if step == steps - 1 and not self.format.whole:
                offset = held(tile.offset(chunk, block, scale))
            for r, place in enumerate(places):
                if offset is not None:
                    there = [totals[row + r, total + number - before] for before in reversed(range(steps))]
                found = add_sums(sums[place], [get(own, r)], [scales[row + r, column]], scale, offset, there, less)
                T.buffer_store(sums, found, [place])

    def _dots(self, chunk: Any, inside: Any, number: Any, row: Any, rows: int) -> list[Any]:
        """Of each tile the dots of so many rows with a step, as float_dots.py has them."""
        codes = self.left[0]
        dots = [registers((rows * TILE,), "int32") for _ in self.tiles]
        for r in range(rows):
            start = splat(self.left[3][row + r - self.start, number] if self.format.whole else i32(BITS))
            for own in dots:
                put(own, r, start)
        for part in range(self.step // BLOCK):
            unit = inside * (self.step // BLOCK) + part
            self.ahead.ask_rest(unit)
            with T.serial(0, self.turns[0]) as register:
                self.ahead.ask(unit * _BITS + register)
                several = zip(*(tile.of_register(chunk, unit, register) for tile in self.tiles), strict=True)
                for piece, words in enumerate(several):
                    column = (chunk * _UNITS + unit) * (BLOCK // 4) + piece * _BITS + register
                    for r in range(rows):
                        x = codes[row + r, column]
                        for own, word in zip(dots, words, strict=True):
                            put(own, r, dot4(self.target, get(own, r), word, x, wide=self.top >= MIDDLE))
        return dots


class _Ahead:
    """Asks for the weights of two tiles that are some chunks ahead, a few lines with each register of codes."""

    def __init__(self, tiles: list[Tile]) -> None:
        self.tiles, first = tiles, tiles[0]
        self.chunks = first.target.knobs.prefetch_far_bytes // len(tiles) // (4 * first.chunk_words)
        self.next = [registers((1,), "int64") for _ in tiles]
        self.each, rest = divmod(-(-first.chunk_words // TILE), _UNITS * _BITS)  # lines for each
        self.first_rest, self.rest = _UNITS * _BITS * self.each, -(-rest // _UNITS)  # and for each unit

    def begin(self) -> None:
        """At the first chunk: ask for as many lines as the tiles' heads have, which `begin_chunk` leaves out."""
        format, columns = self.tiles[0].format, self.tiles[0].columns
        self.begin_chunk(0)
        self._ask(-(format.head_words(columns) // TILE), format.head_words(columns) // TILE)

    def begin_chunk(self, chunk: Any) -> None:
        """Rows go through this chunk next."""
        for tile, place in zip(self.tiles, self.next, strict=True):
            T.buffer_store(place, T.cast(tile.chunk_place(chunk + self.chunks, len(self.tiles)), "int64"), [0])

    def ask(self, register: Any) -> None:
        """Ask for the lines of a register of the chunk."""
        self._ask(register * self.each, self.each)

    def ask_rest(self, unit: Any) -> None:
        """Ask for what the registers of a unit leave out."""
        self._ask(self.first_rest + unit * self.rest, self.rest)

    def _ask(self, line: Any, lines: int) -> None:
        if self.chunks:
            for place, tile in zip(self.next, self.tiles, strict=True):
                for number in range(lines):
                    prefetch(tile.weight.access_ptr("r", offset=place[0] + (line + number) * TILE), far=True)
