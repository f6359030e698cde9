"""A linear layer on CUDA, as all its launches see it: operands, and the order of its sums.

A slab is 128 columns, neighbouring slabs make up a strand, which is summed from zero, and strands are added in order.
That order does not depend on the number of rows: a row has the same bits alone and beside others, wherever it stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats.plain import tiles
from llmc.targets.cuda.fragments import Read
from llmc.targets.cuda.operands import Form, Operands
from llmc.targets.cuda.stream import SLAB, Pieces, Words

ROWS = 8  # of x that one product takes
MOST_STRANDS = 8


@dataclass(frozen=True)
class Product:
    """One linear layer: its operands, and how its sums are made."""

    x: Any
    weight: Any
    out: Any
    form: Form
    width: int
    columns: int
    read: Read
    x_parts: int  # of a number of x

    def run(self) -> int:
        """Slabs of a strand."""
        return -(-self.slabs() // MOST_STRANDS)

    def slabs(self) -> int:
        """Of a row."""
        return -(-self.columns // SLAB)

    def strands(self) -> int:
        """Of a row: none is empty, the last one may be short."""
        return -(-self.slabs() // self.run())

    def slabs_of(self, strand: Any) -> Any:
        """How many slabs a strand has."""
        run = self.run()
        return run if self.slabs() % run == 0 else T.min(run, self.slabs() - strand * run)

    def tiles(self, first: Any, count: int) -> list[Any]:
        """A warp's tiles; those that there are, in place of some beyond the last."""
        return [T.min(first + own, tiles(self.width) - 1) for own in range(count)]

    def pieces(self) -> Pieces:
        """Where a slab stands in a tile."""
        tile = math.prod(int(size) for size in self.weight.shape[1:])
        return Pieces(self.form.name, self.columns, tile)

    def direct(self, first: Any, slab: Any, count: int) -> list[Words]:
        """A slab of a warp's tiles, out of the matrix."""
        return [Words(self.pieces(), self.weight, tile, slab) for tile in self.tiles(first, count)]

    def words(self, row: Any, column: Any, operands: Operands) -> list[list[Any]]:
        """A lane's words of 32 columns, for each product. A row beyond the last is another one, and not written."""
        row, whole = T.min(row, self.out.shape[0] - 1), self.columns % SLAB == 0
        found = self.read(self.x, row, column, operands.quarter, self.form.pair, whole)
        return [[word for part in step for word in part] for step in found]
