"""Products of many rows with panels of a block format (panels.py), by vector instructions on few registers.

Where there are sixteen vector registers, three rows at a time are all that unpacked weights leave room for. Weights of
a panel come from memory instead, ready to be multiplied, and more rows share them.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import MIDDLE, TILE, BlockFormat
from llmc.targets.matrices.block_sums import start_of, start_times
from llmc.targets.matrices.codes import Tile
from llmc.targets.matrices.linear import Write, get, in_groups, put, zeros
from llmc.targets.matrices.panels import PANEL, WORDS, Panel, Piece, Rows
from llmc.targets.narrow import add_pairs, pairs_added, sums_of_pairs
from llmc.targets.target import Target
from llmc.targets.vector import dot4, held, i32, lanes, registers, splat

_ROWS = 5  # of a group: measured
_HALF = 16  # what a half byte is below


def are_for(target: Target) -> bool:
    """Whether many rows had better go through panels: with more registers they need none."""
    return target.has("avx2") and not target.has("avx512f")


def multiply(
    target: Target, format: BlockFormat, columns: int, buffers: list[Any], tile: Any, start: Any, count: Any,
    write: Write,
) -> None:  # fmt: skip
    """Rows `start` to `start + count` of `buffers` (codes, scales, sums or starts, weight) times a tile.

    They are `panel_rows` at least.
    """
    *left, weight = buffers
    reader = Tile(target, format, weight, columns, tile, quick=False, asks=False)
    halved = reader.top >= MIDDLE and sums_of_pairs(target, _HALF - 1) > 1
    pieces: list[Piece] = [_low, _high] if halved else [_as_it_is]
    top = _HALF - 1 if halved else reader.top
    times = start_times(reader.zero) if format.whole and sums_of_pairs(target, top) > 1 else 1
    panel = Panel(reader, pieces, PANEL // len(pieces), times)
    rows = Rows(panel, left, start, count, target.knobs.row_block)
    dots = _Dots(target, rows, top, times)

    def add(first: Any, chunks: Any) -> None:
        def ask(chunk: Any, row: Any) -> None:
            with T.If(row == 0), T.Then():
                reader.ask_for(chunk + panel.chunks)

        def group(row: Any, several: int) -> None:
            rows.add(first, chunks, row, several, dots.of, ask)

        in_groups(target, count, group, more=0, usual=_ROWS, fewest=target.knobs.panel_rows)

    rows.through_panels(add)
    rows.write(write)


def _as_it_is(word: Any) -> Any:
    return word


def _low(word: Any) -> Any:
    return T.bitwise_and(word, splat(i32(0x0F0F0F0F)))


def _high(word: Any) -> Any:
    return _low(T.shift_right(word, splat(i32(4))))


class _Dots:
    """Integer dots of rows with a panel of bytes up to `top`, `times` as great as they are."""

    def __init__(self, target: Target, rows: Rows, top: int, times: int) -> None:
        self.target, self.rows, self.times = target, rows, times
        self.run, self.wide = sums_of_pairs(target, top), top >= MIDDLE

    def of(self, chunk: Any, at: Any, step: int, row: Any, rows: int) -> Any:
        """`Dots` of panels.py."""
        panel, left, words = self.rows.panel, self.rows.start + row, self.rows.step // 4
        dots = registers((rows * TILE,), "int32")
        for r in range(rows):
            put(dots, r, self._start(chunk, step, left + r))
        run, end = self.run if self.run > 1 else words, (step + 1) * words
        for piece in range(len(panel.pieces)):
            for first in range(step * words, end, run):
                place, groups = panel.place(at, first, piece), min(run, end - first)
                self._add(dots, left, chunk * WORDS + first, place, groups, rows, self.times * _HALF**piece)
        return dots

    def _start(self, chunk: Any, step: int, row: Any) -> Any:
        if not self.rows.panel.format.whole:
            return splat(i32(0))
        stored = self.rows.total(row, chunk * self.rows.steps + step)
        return splat(stored) if self.times > 1 else start_of(self.rows.panel.reader.zero, stored)

    def _add(self, dots: Any, left: Any, word: Any, place: Any, groups: int, rows: int, times: int) -> None:
        """dots += the products of groups of four columns, `word` on the left the first, so many times."""
        codes, panel = self.rows.left[0], self.rows.panel
        sums = dots if self.run == 1 else zeros(rows, "int32")
        for group in range(groups):
            weights = held(panel.words[lanes(place + group * TILE)], "int32")
            for r in range(rows):
                x = codes[left + r, word + group]
                if self.run == 1:
                    put(dots, r, dot4(self.target, get(dots, r), weights, x, self.wide))
                else:
                    put(sums, r, add_pairs(self.target, get(sums, r), weights, held(splat(x), "int32")))
        for r in range(rows if self.run > 1 else 0):
            put(dots, r, get(dots, r) + pairs_added(self.target, get(sums, r), times))
