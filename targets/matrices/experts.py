"""Matrices of experts: a row is multiplied with those that it was routed to, as linear layers multiply.

Rows are pairs here (pairs.py), sorted by expert, and an expert's weights are read in the order of memory. Where it has
more than a few pairs, their left sides are copied to stand together, so that all there is for rows of linear layers is
for them. Each pair is summed by itself and a row's pairs are added in the order of their experts, so that its result
never depends on the rows beside it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.arguments import arguments
from llmc.targets.matrices.linear import Write, get, tiles_of_turn
from llmc.targets.matrices.pair_products import Left, Multiply, PairProduct, slices, tile_of
from llmc.targets.matrices.pairs import Pairs
from llmc.targets.matrices.reductions import PER_WORD, product_of
from llmc.targets.parallel import parallel, parallel_ranges
from llmc.targets.target import Target
from llmc.targets.vector import f32, fma, lanes, splat

ROW_BLOCK = 512  # rows that are sorted at once
SHARES = 64  # of the work on the way in
# Of the result, 16 columns of a row each: what is added to again and again stays in the second-level cache. Measured.
_RESULT = 8192


def experts_in(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, C), ids (M, U), packed weight (E F, C) -> (M, U F), F = attrs width."""
    inner = int(shapes[0][1]) * PER_WORD[kind]
    product = product_of(kind, target, attrs["format"], inner)
    width, tiles = int(attrs["width"]), int(attrs["width"]) // TILE
    parts = [replace(part, step=0) for part in slices(kind, attrs["format"], inner, 1)]
    with IRBuilder() as builder, T.prim_func():
        *left, ids, weight, out = arguments([*product.dtypes[:-1], "int32", product.dtypes[-1], "float32"], shapes)
        pairs = Pairs(ids, ROW_BLOCK, int(attrs["experts"]))
        with T.serial(0, T.ceildiv(shapes[0][0], ROW_BLOCK)) as block:
            start = block * ROW_BLOCK
            pairs.sort(start, T.min(shapes[0][0] - start, ROW_BLOCK))
            own = PairProduct(product, Left(left, parts, pairs, start), target)

            def place(at: Any, tile: Any, start: Any = start) -> list[Any]:
                return [start + pairs.row(at), lanes(pairs.place(at) * width + tile * TILE)]

            with T.If(pairs.ends[0] > 0), T.Then(), parallel(target, pairs.ends[0]) as at, T.serial(0, tiles) as tile:
                T.buffer_store(out, splat(f32(0)), place(at, tile))
            with parallel(target, SHARES) as share, T.serial(0, pairs.many[0]) as number:
                expert = pairs.there[number]
                first, end = pairs.tiles_of(share, SHARES, number, tiles)

                def some(
                    multiply: Multiply, together: int, at: Any, _: Any, place: Any = place, expert: Any = expert,
                    first: Any = first, end: Any = end,
                ) -> None:  # fmt: skip
                    with T.serial(0, T.ceildiv(end - first, together)) as turn:

                        def write(tile: Any, sums: Any, row: Any, rows: int) -> None:
                            for r in range(rows):
                                T.buffer_store(out, get(sums, r), place(at + row + r, tile))

                        own = tiles_of_turn(turn, first, end, together)
                        writes: list[Write] = [partial(write, tile) for tile in own]
                        multiply(weight, [tile_of(expert, tiles, tile) for tile in own], writes)

                with T.If(first < end), T.Then():
                    own.each(expert, some)
    return builder.get()


def experts_out(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, U F), ids and weights (M, U), packed weight (E C, F) -> (M, C), C = attrs width."""
    used = int(shapes[-4][1])
    inner = int(shapes[0][1]) * PER_WORD[kind] // used
    product = product_of(kind, target, attrs["format"], inner)
    tiles = int(attrs["width"]) // TILE
    parts = slices(kind, attrs["format"], inner, used)
    with IRBuilder() as builder, T.prim_func():
        types = [*product.dtypes[:-1], "int32", "float32", product.dtypes[-1], "float32"]
        *left, ids, shares, weight, out = arguments(types, shapes)
        pairs = Pairs(ids, ROW_BLOCK, int(attrs["experts"]))
        with T.serial(0, T.ceildiv(shapes[0][0], ROW_BLOCK)) as block:
            start = block * ROW_BLOCK
            count = T.min(shapes[0][0] - start, ROW_BLOCK)
            pairs.sort(start, count)
            own = PairProduct(product, Left(left, parts, pairs, start), target)
            with parallel_ranges(target, tiles) as (own_first, own_end):
                some = T.max(T.floordiv(_RESULT, T.cast(count, "int32")), 1)
                with T.serial(0, T.ceildiv(own_end - own_first, some)) as part:
                    first = own_first + part * some
                    end = T.min(first + some, own_end)
                    with T.serial(0, count) as row, T.serial(first, end) as tile:
                        T.buffer_store(out, splat(f32(0)), [start + row, lanes(tile * TILE)])
                    with T.serial(0, pairs.many[0]) as number:
                        expert = pairs.there[number]

                        def add(
                            multiply: Multiply, together: int, at: Any, _: Any, start: Any = start,
                            expert: Any = expert, first: Any = first, end: Any = end,
                        ) -> None:  # fmt: skip
                            with T.serial(0, T.ceildiv(end - first, together)) as turn:

                                def write(tile: Any, counts: Any, sums: Any, pair: Any, rows: int) -> None:
                                    for r in range(rows):
                                        row = start + pairs.row(at + pair + r)
                                        share = splat(shares[row, pairs.place(at + pair + r)])
                                        where = [row, lanes(tile * TILE)]
                                        with T.If(counts), T.Then():
                                            T.buffer_store(out, fma(share, get(sums, r), out[tuple(where)]), where)

                                own = tiles_of_turn(turn, first, end, together)
                                news = [first + turn * together + i < end for i in range(together)]  # others are there
                                writes: list[Write] = [partial(write, *each) for each in zip(own, news, strict=True)]
                                multiply(weight, [tile_of(expert, tiles, tile) for tile in own], writes)

                        own.each(expert, add)
    return builder.get()


KERNELS: dict[str, Any] = {
    f"{kind}_experts_{way}": partial(make, kind)
    for kind in PER_WORD
    for way, make in (("in", experts_in), ("out", experts_out))
}
