"""What pairs of a row and an expert have on their left, where it lies or copied to stand together, and its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import SUM_BLOCK, block_format
from llmc.targets.matrices.linear import Product, RowsOfTiles, Write
from llmc.targets.matrices.pairs import Pairs
from llmc.targets.matrices.reductions import PER_WORD
from llmc.targets.rows.rows import columns
from llmc.targets.target import Target
from llmc.targets.vector import lanes, registers

PANEL = 64  # pairs that are copied at once, at most: they stay in the second-level cache
FEW = 2  # pairs of an expert that are multiplied where they lie: to copy them takes longer

# The pairs at hand times tiles; what writes takes sums, the first pair's number, how many
Multiply = RowsOfTiles


@dataclass(frozen=True)
class Part:
    """Columns of a left operand that belong to a pair: `count` from `first` + its place times `step` on."""

    first: int
    step: int
    count: int
    to: int  # where a copy of them begins


class Left:
    """The left operands (rows, columns) of all pairs, and the parts of a row that a pair has."""

    def __init__(self, buffers: list[Any], parts: list[Part], pairs: Pairs, start: Any) -> None:
        self.buffers, self.parts, self.pairs, self.start = buffers, parts, pairs, start

    def picked(self, at: Any, count: int) -> list[Any]:
        """Operands whose rows are `count` pairs from the `at`-th on, where they lie."""
        rows, places = registers((count,), "int64"), registers((count,), "int32")
        for r in range(count):
            T.buffer_store(rows, self.start + T.cast(self.pairs.row(at + r), "int64"), [r])
            T.buffer_store(places, self.pairs.place(at + r), [r])
        return [_Picked(b, p, rows, places) for b, p in zip(self.buffers, self.parts, strict=True)]

    def standing(self, at: Any) -> list[Any]:
        """Operands whose rows are pairs from the `at`-th on, however many, where they lie."""
        rows = _Looked(lambda pair: self.start + self.pairs.row(at + pair))
        places = _Looked(lambda pair: self.pairs.place(at + pair))
        return [_Picked(b, p, rows, places) for b, p in zip(self.buffers, self.parts, strict=True)]

    def copies(self, count: int) -> list[Any]:
        """Memory of this thread's for so many pairs."""
        return [
            T.alloc_buffer((count, part.to + part.count), buffer.dtype)
            for buffer, part in zip(self.buffers, self.parts, strict=True)
        ]

    def copy(self, at: Any, count: Any, copies: list[Any]) -> None:
        """Copy the parts of `count` pairs from the `at`-th on."""
        with T.serial(0, count) as r:
            row, place = self.start + self.pairs.row(at + r), self.pairs.place(at + r)
            for buffer, part, out in zip(self.buffers, self.parts, copies, strict=True):
                _copy(buffer, row, part.first + place * part.step, part.count, out, r, part.to)


def _copy(buffer: Any, row: Any, first: Any, count: int, out: Any, to_row: Any, to: int) -> None:
    """`count` columns of a row of buffer from `first` on, into a row of out from `to` on."""
    columns(
        count,
        lambda c: T.buffer_store(out, buffer[row, lanes(first + c)], [to_row, lanes(to + c)]),
        lambda c: T.buffer_store(out, buffer[row, first + c], [to_row, to + c]),
    )


class _Looked:
    """Numbers that are looked up when they are asked for."""

    def __init__(self, number: Callable[[Any], Any]) -> None:
        self.number = number

    def __getitem__(self, index: Any) -> Any:
        return self.number(index)


class _Picked:
    """A buffer whose row r is the part of pair r, as if a copy of it."""

    def __init__(self, buffer: Any, part: Part, rows: Any, places: Any) -> None:
        self.buffer, self.part, self.rows, self.places = buffer, part, rows, places

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        pair, column = index
        first = self.part.first - self.part.to
        return self.buffer[self.rows[pair], first + self.places[pair] * self.part.step + column]


def slices(kind: str, format: str, inner: int, used: int) -> list[Part]:
    """The parts of each left operand that are a pair's slice of `inner` columns, as if these were all there is.

    Totals of codes are those of blocks of 32 columns, and after these, for all slices, of 16.
    """
    words = inner // PER_WORD[kind]
    parts = [Part(0, words, words, 0)]
    if kind != "i8":
        return parts
    packing = block_format(format)
    blocks = inner // packing.left_block
    parts.append(Part(0, blocks, blocks, 0))
    if packing.block == SUM_BLOCK:  # a product asks for totals of 16, which it expects behind those of 32
        finer = inner // SUM_BLOCK
        return [*parts, Part(used * blocks, finer, finer, blocks)]
    return [*parts, Part(0, blocks, blocks, 0)]


class PairProduct:
    """The product of linear layers, of the pairs of experts."""

    def __init__(self, product: Product, left: Left, target: Target) -> None:
        self.product, self.left, self.target = product, left, target
        self.panel = min(PANEL, target.knobs.row_block)

    def each(self, expert: Any, then: Callable[[Multiply, int, Any, Any], None]) -> None:
        """`then(multiply, together, at, count)` for all pairs of an expert: `count` at once, from the `at`-th on, with
        so many tiles together.
        """
        start, size = self.left.pairs.start(expert), registers((1,), "int32")
        T.buffer_store(size, self.left.pairs.end(expert) - start, [0])
        with T.If(size[0] <= FEW):
            with T.Then():
                for count in range(1, FEW + 1):
                    with T.If(size[0] == count), T.Then():
                        then(self._few(self.left.picked(start, count), count), 1, start, count)
            with T.Else(), T.serial(0, T.ceildiv(size[0], self.panel)) as panel:
                at = start + panel * self.panel
                count = T.min(size[0] - panel * self.panel, self.panel)

                def brought() -> list[Any]:
                    copies = self.left.copies(self.panel)
                    self.left.copy(at, count, copies)
                    return copies

                self.product.each_way(
                    self.target, self.left.standing(at), 0, count, lambda turns: T.serial(0, turns),
                    lambda multiply, together: then(multiply, together, at, count), brought,
                )  # fmt: skip

    def _few(self, picked: list[Any], count: int) -> Multiply:
        def multiply(weight: Any, tiles: list[Any], writes: list[Write]) -> None:
            (tile,), (write,) = tiles, writes
            write(self.product.body([*picked, weight])(tile, 0, count), 0, count)

        return multiply


def tile_of(expert: Any, tiles: int, tile: Any) -> Any:
    """The expert's `tile`, of `tiles`, among those of all; 64 bits, for all matrices can have 2^31 words."""
    place = registers((1,), "int64")
    T.buffer_store(place, T.cast(expert, "int64") * tiles + T.cast(tile, "int64"), [0])
    return place[0]
