"""Matrices of experts: a row is multiplied with those that it was routed to, as linear layers multiply.

Rows are pairs here (pairs.py), sorted by expert, and an expert's weights are read in the order of memory. Where it has
more than a few pairs, their left sides are copied to stand together, so that all there is for rows of linear layers is
for them. Each pair is summed by itself and a row's pairs are added in the order of their experts, so that its result
never depends on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, FORMATS, SUM_BLOCK, TILE, BlockFormat
from llmc.targets.arguments import arguments
from llmc.targets.matrices.linear import Product, get
from llmc.targets.matrices.pairs import Pairs
from llmc.targets.matrices.reductions import PER_WORD, product_of
from llmc.targets.parallel import parallel, parallel_ranges
from llmc.targets.rows.rows import columns
from llmc.targets.target import Target
from llmc.targets.vector import f32, fma, lanes, registers, splat

ROW_BLOCK = 512  # rows that are sorted at once
PANEL = 64  # pairs that are copied at once, at most: they stay in the second-level cache
FEW = 2  # pairs of an expert that are multiplied where they lie: to copy them takes longer

SHARES = 64  # of the work on the way in


@dataclass(frozen=True)
class _Part:
    """Columns of a left operand that belong to a pair: `count` from `first` + its place times `step` on."""

    first: int
    step: int
    count: int
    to: int  # where a copy of them begins


class _Left:
    """The left operands (rows, columns) of all pairs, and the parts of a row that a pair has."""

    def __init__(self, buffers: list[Any], parts: list[_Part], pairs: Pairs, start: Any) -> None:
        self.buffers, self.parts, self.pairs, self.start = buffers, parts, pairs, start

    def picked(self, at: Any, count: int) -> list[Any]:
        """Operands whose rows are `count` pairs from the `at`-th on, where they lie."""
        rows, places = registers((count,), "int64"), registers((count,), "int32")
        for r in range(count):
            T.buffer_store(rows, self.start + T.cast(self.pairs.row(at + r), "int64"), [r])
            T.buffer_store(places, self.pairs.place(at + r), [r])
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
                first = part.first + place * part.step
                columns(
                    part.count,
                    lambda c, b=buffer, p=part, o=out, f=first: T.buffer_store(
                        o, b[row, lanes(f + c)], [r, lanes(p.to + c)]
                    ),
                    lambda c, b=buffer, p=part, o=out, f=first: T.buffer_store(o, b[row, f + c], [r, p.to + c]),
                )


class _Picked:
    """A buffer whose row r is the part of pair r, as if a copy of it."""

    def __init__(self, buffer: Any, part: _Part, rows: Any, places: Any) -> None:
        self.buffer, self.part, self.rows, self.places = buffer, part, rows, places

    def __getitem__(self, index: tuple[int, Any]) -> Any:
        pair, column = index
        first = self.part.first - self.part.to
        return self.buffer[self.rows[pair], first + self.places[pair] * self.part.step + column]


def experts_in(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, C), ids (M, U), packed weight (E F, C) -> (M, U F), F = attrs width."""
    inner = int(shapes[0][1]) * PER_WORD[kind]
    product = product_of(kind, target, attrs["format"], inner)
    width, tiles = int(attrs["width"]), int(attrs["width"]) // TILE
    parts = [replace(part, step=0) for part in _slices(kind, attrs["format"], inner, 1)]
    with IRBuilder() as builder, T.prim_func():
        *left, ids, weight, out = arguments([*product.dtypes[:-1], "int32", product.dtypes[-1], "float32"], shapes)
        pairs = Pairs(ids, ROW_BLOCK, int(attrs["experts"]))
        with T.serial(0, T.ceildiv(shapes[0][0], ROW_BLOCK)) as block:
            start = block * ROW_BLOCK
            pairs.sort(start, T.min(shapes[0][0] - start, ROW_BLOCK))

            def place(at: Any, tile: Any, start: Any = start) -> list[Any]:
                return [start + pairs.row(at), lanes(pairs.place(at) * width + tile * TILE)]

            def write(at: Any, tile: Any, sums: Any, rows: int, place: Any = place) -> None:
                for r in range(rows):
                    T.buffer_store(out, get(sums, r), place(at + r, tile))

            with T.If(pairs.ends[0] > 0), T.Then(), parallel(target, pairs.ends[0]) as at, T.serial(0, tiles) as tile:
                T.buffer_store(out, splat(f32(0)), place(at, tile))
            with parallel(target, SHARES) as share:
                turn = _Turn(product, _Left(left, parts, pairs, start), weight, tiles, write, target)
                with T.serial(0, pairs.many[0]) as number:
                    first, end = pairs.tiles_of(share, SHARES, number, tiles)
                    turn.multiply(pairs.there[number], first, end)
    return builder.get()


def experts_out(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, U F), ids and weights (M, U), packed weight (E C, F) -> (M, C), C = attrs width."""
    used = int(shapes[-4][1])
    inner = int(shapes[0][1]) * PER_WORD[kind] // used
    product = product_of(kind, target, attrs["format"], inner)
    tiles = int(attrs["width"]) // TILE
    parts = _slices(kind, attrs["format"], inner, used)
    with IRBuilder() as builder, T.prim_func():
        types = [*product.dtypes[:-1], "int32", "float32", product.dtypes[-1], "float32"]
        *left, ids, shares, weight, out = arguments(types, shapes)
        pairs = Pairs(ids, ROW_BLOCK, int(attrs["experts"]))
        with T.serial(0, T.ceildiv(shapes[0][0], ROW_BLOCK)) as block:
            start = block * ROW_BLOCK
            count = T.min(shapes[0][0] - start, ROW_BLOCK)
            pairs.sort(start, count)

            def write(at: Any, tile: Any, sums: Any, rows: int, start: Any = start) -> None:
                for r in range(rows):
                    row = start + pairs.row(at + r)
                    share = splat(shares[row, pairs.place(at + r)])
                    where = [row, lanes(tile * TILE)]
                    T.buffer_store(out, fma(share, get(sums, r), out[tuple(where)]), where)

            with parallel_ranges(target, tiles) as (first, end):
                with T.serial(0, count) as row, T.serial(first, end) as tile:
                    T.buffer_store(out, splat(f32(0)), [start + row, lanes(tile * TILE)])
                turn = _Turn(product, _Left(left, parts, pairs, start), weight, tiles, write, target)
                with T.serial(0, pairs.many[0]) as number:
                    turn.multiply(pairs.there[number], first, end)
    return builder.get()


class _Turn:
    """What a thread does at a time: some tiles of some experts, of `tiles` each, for all their pairs.

    `write(at, tile, sums, rows)` takes the sums of `rows` pairs from the `at`-th on, one register each.
    """

    def __init__(
        self, product: Product, left: _Left, weight: Any, tiles: int, write: Callable[[Any, Any, Any, int], None],
        target: Target
    ) -> None:  # fmt: skip
        self.product, self.left, self.weight, self.tiles, self.write = product, left, weight, tiles, write
        self.target, self.panel = target, min(PANEL, target.knobs.row_block)

    def multiply(self, expert: Any, first: Any, end: Any) -> None:
        """Tiles `first` to `end` of an expert, times each of its pairs."""
        start, size = self.left.pairs.start(expert), registers((1,), "int32")
        T.buffer_store(size, self.left.pairs.end(expert) - start, [0])
        with T.If(size[0] <= FEW):
            with T.Then():
                for count in range(1, FEW + 1):
                    with T.If(size[0] == count), T.Then():
                        reduce = self.product.body([*self.left.picked(start, count), self.weight])
                        with T.serial(first, end) as tile:
                            self.write(start, tile, reduce(self._of(expert, tile), 0, count), count)
            with T.Else(), T.If(first < end), T.Then(), T.serial(0, T.ceildiv(size[0], self.panel)) as panel:
                copies = self.left.copies(self.panel)
                at = start + panel * self.panel
                count = T.min(size[0] - panel * self.panel, self.panel)
                self.left.copy(at, count, copies)
                with T.serial(first, end) as tile:

                    def write(sums: Any, row: Any, rows: int, tile: Any = tile, at: Any = at) -> None:
                        self.write(at + row, tile, sums, rows)

                    buffers = [*copies, self.weight]
                    self.product.rows_of_tile(self.target, buffers, self._of(expert, tile), 0, count, write)

    def _of(self, expert: Any, tile: Any) -> Any:
        """The expert's `tile` among those of all; 64 bits, for the matrices of all experts can have 2^31 words."""
        place = registers((1,), "int64")
        T.buffer_store(place, T.cast(expert, "int64") * self.tiles + T.cast(tile, "int64"), [0])
        return place[0]


def _slices(kind: str, format: str, inner: int, used: int) -> list[_Part]:
    """The parts of each left operand that are a pair's slice of `inner` columns, as if these were all there is.

    Totals of codes are those of blocks of 32 columns, and after these, for all slices, of 16.
    """
    words = inner // PER_WORD[kind]
    parts = [_Part(0, words, words, 0)]
    if kind != "i8":
        return parts
    packing = FORMATS[format]
    assert isinstance(packing, BlockFormat)
    blocks = inner // BLOCK
    parts.append(_Part(0, blocks, blocks, 0))
    if packing.block == SUM_BLOCK:  # a product asks for totals of 16, which it expects behind those of 32
        finer = inner // SUM_BLOCK
        return [*parts, _Part(used * blocks, finer, finer, blocks)]
    return [*parts, _Part(0, blocks, blocks, 0)]


KERNELS: dict[str, Any] = {
    f"{kind}_experts_{way}": partial(make, kind)
    for kind in PER_WORD
    for way, make in (("in", experts_in), ("out", experts_out))
}
