"""Left operands copied for tile registers (tiles.py): what a group of sixteen rows has of some columns stands together.

Where they come from rows are as far apart as they are long, often a power of two: few places of a cache take them all.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BlockFormat
from llmc.targets import tiles
from llmc.targets.matrices.block_sums import first_total, step_of


class TiledLeft:
    """Codes (groups, steps, 16, words of a step), scales and totals (groups, blocks or steps, 16) of up to `rows` rows.

    A row is named (group, place in it). Totals are left out where a format's offset is a whole number: tiles of signed
    bytes have it taken off.
    """

    def __init__(self, format: BlockFormat, columns: int, rows: int) -> None:
        self.step, self.groups = step_of(format), -(-rows // tiles.ROWS)
        self.steps, self.blocks = columns // self.step, columns // format.left_block
        self.codes = T.alloc_buffer((self.groups * tiles.ROWS * columns // 4,), "int32")
        self.scales = _Numbers(self.groups, 0, self.blocks)
        self.totals = None if format.whole else _Numbers(self.groups, first_total(format, columns), self.steps)

    def codes_of(self, group: Any, step: Any) -> Any:
        """Where the codes of a step begin: sixteen rows, one after another."""
        return (group * self.steps + step) * (tiles.ROWS * self.step // 4)

    def copy(self, left: list[Any], start: Any, count: Any, group: Any) -> None:
        """A group of `count` rows of `left` from `start` on; behind the last row that one again."""
        codes, scales, totals = left
        words = self.step // 4
        with T.serial(0, tiles.ROWS) as place:
            row = start + T.min(group * tiles.ROWS + place, count - 1)
            with T.serial(0, self.steps) as step:
                to = self.codes_of(group, step) + place * words
                T.buffer_store(self.codes, codes[row, T.ramp(step * words, 1, words)], [T.ramp(to, 1, words)])
            self.scales.copy(scales, row, group, place)
            if self.totals is not None:
                self.totals.copy(totals, row, group, place)


class _Numbers:
    """`count` numbers of each row of each group, those of sixteen rows together, indexed as those they are copied from:
    by row and column, the `first` column and those after it.
    """

    def __init__(self, groups: int, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.buffer = T.alloc_buffer((groups * count * tiles.ROWS,), "float32")

    def __getitem__(self, index: tuple[tuple[Any, Any], Any]) -> Any:
        (group, place), column = index
        return self.buffer[(group * self.count + (column - self.first)) * tiles.ROWS + place]

    def copy(self, numbers: Any, row: Any, group: Any, place: Any) -> None:
        """Those of a row of `numbers`."""
        with T.serial(0, self.count) as number:
            to = (group * self.count + number) * tiles.ROWS + place
            T.buffer_store(self.buffer, numbers[row, self.first + number], [to])
