"""Products of many rows with panels of a block format (panels.py), by vector instructions on few registers.

Where there are sixteen vector registers, three rows at a time are all that unpacked weights leave room for. Weights of
a panel come from memory instead, ready to be multiplied, and more rows share them.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import MIDDLE, BlockFormat
from llmc.targets.matrices.block_dots import add_dots, start_of, start_times
from llmc.targets.matrices.codes import Tile
from llmc.targets.matrices.linear import Write, get, in_groups
from llmc.targets.matrices.panels import PANEL, WORDS, Panel, Piece, Rows
from llmc.targets.narrow import functions, sums_of_pairs
from llmc.targets.target import Target
from llmc.targets.vector import i32, imported, splat

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
    signed = reader.signed
    halved = not signed and reader.top >= MIDDLE and sums_of_pairs(target, _HALF - 1) > 1
    pieces: list[Piece] = [_low, _high] if halved else [_as_it_is]
    top = _HALF - 1 if halved else reader.top
    times = start_times(reader.zero) if format.whole and not signed and sums_of_pairs(target, top) > 1 else 1
    panel = Panel(reader, pieces, PANEL // len(pieces), times)
    rows = Rows(panel, left, start, count, target.knobs.row_block)

    def start_at(row: Any, step: Any) -> Any:
        if not format.whole:
            return splat(i32(0))
        stored = rows.total(row, step)
        return splat(stored) if times > 1 else start_of(reader.start_zero, stored)

    def dots(chunk: Any, at: Any, step: int, row: Any, several: int) -> Any:
        if step == 0:
            with T.If(row == 0), T.Then():  # the first rows ask for the next panel
                reader.ask_for(chunk + panel.chunks)
        first, groups = step * rows.step // 4, rows.step // 4
        sums = [start_at(start + row + r, chunk * rows.steps + step) for r in range(several)]
        for piece in range(len(pieces)):
            found = add_dots(
                target, top, left[0], start + row, chunk * WORDS + first, groups,
                panel.held_words(at, first, groups, piece), sums, times * _HALF**piece, signed,
            )  # fmt: skip
            sums = [get(found, r) for r in range(several)]
        return found

    def add(first: Any, chunks: Any) -> None:
        def group(row: Any, several: int) -> None:
            rows.add(first, chunks, row, several, dots)

        in_groups(target, count, group, more=0, usual=_ROWS, fewest=target.knobs.panel_rows)

    with imported(*functions(target, top)):
        rows.through_panels(add)
    rows.write(write, 0, count)


def _as_it_is(word: Any) -> Any:
    return word


def _low(word: Any) -> Any:
    return T.bitwise_and(word, splat(i32(0x0F0F0F0F)))


def _high(word: Any) -> Any:
    return _low(T.shift_right(word, splat(i32(4))))
