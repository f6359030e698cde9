"""Linear layers over packed weights: y (M, N) = x (M, K) @ W^T, one loop nest for every format and row count.

A thread owns a range of tiles (16 output rows) and streams their weights once for each block of `row_block` input
rows; inside, rows go in groups that share each weight register. Every row's sum runs over K in the same order
whatever its group, so a row's result never depends on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE, ceil_to
from llmc.targets.arguments import arguments
from llmc.targets.parallel import parallel
from llmc.targets.target import Target
from llmc.targets.vector import fma, lanes, prefetch, registers, splat

MORE_ROWS = 2  # that a group may have above the usual
# Rows of a group whose sums are all that it keeps, and how many more it may have when there are few: measured.
_ROWS_OF_F32 = {"avx512f": (8, MORE_ROWS), "avx2": (6, 0)}

_PAIRED = 12  # rows of a group that goes through two tiles: their sums take 24 of 32 registers
_MANY_F32 = 5 * _PAIRED  # rows from which on there are such groups, all of them of nearly that size

# emit(tile, first row, rows in the group): adds the whole reduction into registers and returns them
Reduce = Callable[[Any, Any, int], Any]


def f32_linear(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) float32, weight (T, K, 16) float32 -> (M, width)."""
    return template(target, shapes, f32_product(target, int(shapes[0][1])))


def f32_product(target: Target, columns: int) -> Product:
    """The product of f32_linear."""
    usual, more = known_rows(target, _ROWS_OF_F32)
    ways = (_many_f32(target, columns),) if target.has("avx512f") else ()
    return Product(["float32", "float32"], f32_body(columns), more, usual, ways)


def f32_body(columns: int) -> Callable[[list[Any]], Reduce]:
    """Buffers (x, weight) -> the reduction over `columns` of them."""

    def body(buffers: list[Any]) -> Reduce:
        x, weight = buffers

        def reduce(tile: Any, row: Any, rows: int) -> Any:
            acc = zeros(rows, "float32")
            with T.serial(0, columns) as k:
                w = weight[tile, k, lanes(0)]
                for r in range(rows):
                    put(acc, r, fma(splat(x[row + r, k]), w, get(acc, r)))
            return acc

        return reduce

    return body


def _many_f32(target: Target, columns: int) -> Many:
    """Two tiles together: a number that is read once is multiplied twice, which leaves the loads room."""

    def whole(operands: list[Any], tiles: list[Any], start: Any, count: Any, writes: list[Write]) -> None:
        x, weight = operands

        def group(first: Any, rows: int) -> None:
            sums, row = [zeros(rows, "float32") for _ in tiles], start + first
            with T.serial(0, columns) as k:
                words = [weight[tile, k, lanes(0)] for tile in tiles]
                for r in range(rows):
                    left = splat(x[row + r, k])
                    for acc, word in zip(sums, words, strict=True):
                        put(acc, r, fma(left, word, get(acc, r)))
            for write, acc in zip(writes, sums, strict=True):
                write(acc, row, rows)

        in_groups(target, count, group, 0, _PAIRED, _MANY_F32)

    return Many(_MANY_F32, whole, together=2)


def known_rows(target: Target, known: dict[str, tuple[int, int]]) -> tuple[int | None, int]:
    """`usual` and `more` of `in_groups`: what is known for the first flag that the target has."""
    return next((rows for flag, rows in known.items() if target.has(flag)), (None, MORE_ROWS))


# write(sums, first row, rows): takes a tile's sums of these rows, one register each
Write = Callable[[Any, Any, int], None]
# rows_of_tiles(weight, tiles, writes): some rows times tiles of the weight, each given to its tile's `write` once
RowsOfTiles = Callable[[Any, list[Any], list[Write]], None]
# emit(operands, tiles, first row, how many, writes): the same for many rows, however it goes through them
Whole = Callable[[list[Any], list[Any], Any, Any, list[Write]], None]
# A loop whose turns may go to threads: share(turns) -> the number of the turn
Share = Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Many:
    """From `least` rows on a block has something better than groups: `whole`, of so many tiles `together`.

    `copied`: (left operands, first row, how many, share) -> those that `whole` takes in their place; `added`: (left
    operands, first row, how many) -> what it takes behind them. What they emit comes before all tiles.
    """

    least: int
    whole: Whole
    copied: Callable[[list[Any], Any, Any, Share], list[Any]] | None = None
    added: Callable[[list[Any], Any, Any], list[Any]] | None = None
    together: int = 1


@dataclass(frozen=True)
class Product:
    """How rows are multiplied with a tile of outputs.

    `body`: buffers of `dtypes` -> the reduction. `more` and `usual` are for `in_groups`. `ways`: of more rows, that for
    most of them first.
    """

    dtypes: list[str]
    body: Callable[[list[Any]], Reduce]
    more: int = MORE_ROWS
    usual: int | None = None
    ways: tuple[Many, ...] = ()

    def each_way(
        self, target: Target, left: list[Any], start: Any, count: Any, share: Share,
        emit: Callable[[RowsOfTiles, int], None], brought: Callable[[], list[Any]] | None = None,
    ) -> None:  # fmt: skip
        """`emit(rows_of_tiles, together)` for rows `start` to `start + count`: once for few of them, and once for each
        way; so many tiles are asked for together. How many rows there are decides which is run.

        `brought()` emits what makes of left operands, which lie somewhere, rows that can be multiplied; None: they can.
        """
        bring = brought or (lambda: left)

        def in_some_groups(own: list[Any], weight: Any, tiles: list[Any], writes: list[Write]) -> None:
            (tile,), (write,) = tiles, writes
            reduce = self.body([*own, weight])

            def group(row: Any, rows: int) -> None:
                write(reduce(tile, start + row, rows), start + row, rows)

            most = max(1, self.ways[-1].least - 1) if self.ways else None
            in_groups(target, count, group, self.more, self.usual, most=most)

        def in_its_way(way: Many) -> None:
            own = bring() if way.copied is None else way.copied(left, start, count, share)
            own = own if way.added is None else own + way.added(own, start, count)

            def whole(weight: Any, tiles: list[Any], writes: list[Write]) -> None:
                way.whole([*own, weight], tiles, start, count, writes)

            emit(whole, way.together)

        def choose(ways: tuple[Many, ...]) -> None:
            if not ways:
                emit(partial(in_some_groups, bring()), 1)
                return
            with T.If(count >= ways[0].least):
                with T.Then():
                    in_its_way(ways[0])
                with T.Else():
                    choose(ways[1:])

        choose(self.ways)


def template(target: Target, shapes: list[Any], product: Product) -> tirx.PrimFunc:
    """The loops round a product: blocks of rows, tiles in parallel, and the store of a tile."""
    width = int(shapes[-1][1])
    tiles = ceil_to(width, TILE) // TILE
    with IRBuilder() as builder, T.prim_func():
        *left, weight, out = arguments([*product.dtypes, "float32"], shapes)
        rows = shapes[0][0]
        size = target.knobs.row_block
        with T.serial(0, T.ceildiv(rows, size)) as block:
            start = block * size

            def by_tiles(rows_of_tiles: RowsOfTiles, together: int) -> None:
                with parallel(target, -(-tiles // together), together * tile_bytes(weight)) as turn:
                    own = tiles_of_turn(turn, 0, tiles, together)
                    rows_of_tiles(weight, own, [Results(out, tile) for tile in own])

            product.each_way(target, left, start, T.min(rows - start, size), partial(parallel, target), by_tiles)
    return builder.get()


def tiles_of_turn(turn: Any, first: Any, end: Any, together: int) -> list[Any]:
    """The tiles of a turn, of those from the first to `end`; where they are too few for the last, one of them twice."""
    own = [first + turn * together + i for i in range(together)]
    return own if together == 1 else [T.min(tile, end - 1) for tile in own]


def tile_bytes(weight: Any) -> int:
    """Bytes of a tile of packed weights (T, ...), words of four bytes."""
    return 4 * math.prod(int(size) for size in weight.shape[1:])


def group_rows(target: Target, usual: int | None = None) -> int:
    """Rows of a group when there are many: a sum and a dot of each, and what weights are unpacked to, in registers.

    `usual`: as many, where tuning knows no better.
    """
    if target.knobs.row_group:
        return target.knobs.row_group
    return usual or (6 if target.has("avx512f") else 3 if target.has("avx2") else 2)


def in_groups(
    target: Target, count: Any, emit: Callable[[Any, int], None], more: int = MORE_ROWS, usual: int | None = None,
    fewest: int = 1, most: int | None = None,
) -> None:  # fmt: skip
    """`emit(first row, rows)` for `count` rows, `fewest` to `most`, in groups of about one size.

    It is `group_rows(target, usual)`. Few rows go in groups of up to `more` above the usual: once more through the
    weights costs more than a few registers too many.
    """
    many = group_rows(target, usual)
    largest = many + more
    if most is not None:
        many, largest = min(many, most), min(largest, most)
    if isinstance(count, int | tirx.IntImm) and int(count) <= largest:
        return emit(0, int(count))
    groups, each, larger = (registers((1,), "int64") for _ in range(3))
    T.buffer_store(groups, T.cast(T.ceildiv(count, T.Select(count <= 2 * largest, largest, many)), "int64"), [0])
    T.buffer_store(each, T.truncdiv(T.cast(count, "int64"), T.max(groups[0], tirx.const(1, "int64"))), [0])
    T.buffer_store(larger, T.cast(count, "int64") - each[0] * groups[0], [0])
    with T.serial(0, groups[0]) as group:
        first, here = registers((1,), "int64"), registers((1,), "int64")
        T.buffer_store(first, group * each[0] + T.min(group, larger[0]), [0])
        T.buffer_store(here, each[0] + T.Select(group < larger[0], tirx.const(1, "int64"), tirx.const(0, "int64")), [0])
        for size in _sizes(many, largest, fewest):
            with T.If(here[0] == size), T.Then():
                emit(first[0], size)
    return None


def _sizes(many: int, largest: int, fewest: int) -> list[int]:
    """The sizes of groups that so many rows and more may be in.

    >>> _sizes(5, 5, 12), _sizes(3, 4, 1)
    ([4, 5], [1, 2, 3, 4])
    """
    found = set()
    for count in range(fewest, fewest + largest * largest + 2 * largest):
        each, larger = divmod(count, -(-count // (largest if count <= 2 * largest else many)))
        found |= {each, each + (larger > 0)}
    return sorted(found)


class Results:
    """Takes a tile's sums of some rows, as a `Write` does, to out (M, N)."""

    def __init__(self, out: Any, tile: Any) -> None:
        self.out, self.tile, self.width = out, tile, int(out.shape[1])

    def __call__(self, sums: Any, row: Any, rows: int) -> None:
        """Write `rows` rows from `row` on, one register each."""
        for r in range(rows):
            if self.width % TILE == 0:
                T.buffer_store(self.out, get(sums, r), [row + r, lanes(self.tile * TILE)])
                continue
            with T.serial(0, T.min(self.width - self.tile * TILE, TILE)) as lane:
                T.buffer_store(self.out, sums[r * TILE + lane], [row + r, self.tile * TILE + lane])

    def ask(self, row: Any) -> None:
        """Ask for the line that the sums of a row go to, so that they need not wait for it."""
        prefetch(self.out.access_ptr("r", offset=row * self.width + self.tile * TILE))


def zeros(rows: int, dtype: str) -> Any:
    """One register of sixteen zeros a row."""
    acc = registers((rows * TILE,), dtype)
    for r in range(rows):
        put(acc, r, splat(tirx.const(0, dtype)))
    return acc


def get(registers: Any, index: int) -> Any:
    """Register `index` of an array of them."""
    return registers[lanes(index * TILE)]


def put(registers: Any, index: int, value: Any) -> None:
    """Set register `index` of an array of them."""
    T.buffer_store(registers, value, [lanes(index * TILE)])
