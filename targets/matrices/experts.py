"""Matrices of experts: a row is multiplied with those that it was routed to, by the reductions of linear layers.

A thread owns a range of tiles, the same of every expert, and takes all rows through them. A pair is a row and a place
among the experts it uses. When there are more than a few rows, pairs are sorted by expert and go in groups that share
each weight register, as rows do in linear.py. Each pair is summed by itself and a row's pairs are added in the order of
their experts, so that its result never depends on the rows beside it. A pair whose id is below 0 has no expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, FORMATS, SUM_BLOCK, TILE, BlockFormat
from llmc.targets.arguments import arguments
from llmc.targets.matrices.linear import MORE_ROWS, get, group_rows, in_groups
from llmc.targets.matrices.reductions import PER_WORD, reduction
from llmc.targets.parallel import parallel
from llmc.targets.target import Target
from llmc.targets.vector import f32, fma, i32, lanes, registers, splat

SORTED_ROWS = 4  # from so many on pairs are sorted by expert
ROW_BLOCK = 64  # rows that are sorted at once: what a thread keeps of them is on its stack


class _Pairs:
    """Rows and places of some pairs, in registers."""

    def __init__(self, most: int) -> None:
        self.rows, self.places = registers((most,), "int64"), registers((most,), "int32")

    def put(self, index: int, row: Any, place: Any) -> None:
        """Set one."""
        T.buffer_store(self.rows, T.cast(row, "int64"), [index])
        T.buffer_store(self.places, T.cast(place, "int32"), [index])


class _Picked:
    """A buffer whose row r is that of pair r, from column `first` + its place times `step` on."""

    def __init__(self, buffer: Any, pairs: _Pairs, step: int = 0, first: int = 0) -> None:
        self.buffer, self.pairs, self.step, self.first = buffer, pairs, step, first

    def __getitem__(self, index: tuple[int, Any]) -> Any:
        pair, column = index
        if self.step:
            column = self.pairs.places[pair] * self.step + self.first + column
        return self.buffer[self.pairs.rows[pair], column]


# emit(tile, expert, pairs, how many): what one tile of an expert does with some pairs
Emit = Callable[[Any, Any, _Pairs, int], None]


def experts_in(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, C), ids (M, U), packed weight (E F, C) -> (M, U F), F = attrs width."""
    columns = int(shapes[0][1]) * PER_WORD[kind]
    (*left_types, weight_type), make = reduction(kind, target, attrs["format"], columns)
    width = int(attrs["width"])

    def nobody(buffers: list[Any], tile: Any, row: Any, place: Any) -> None:
        T.buffer_store(buffers[-1], splat(f32(0)), [row, lanes(place * width + tile * TILE)])

    def body(buffers: list[Any]) -> Emit:
        *left, _, weight, out = buffers

        def emit(tile: Any, expert: Any, pairs: _Pairs, count: int) -> None:
            reduce = make([*(_Picked(buffer, pairs) for buffer in left), weight])
            acc = reduce(_tile_of(expert, width // TILE, tile), 0, count)
            for r in range(count):
                where = [pairs.rows[r], lanes(pairs.places[r] * width + tile * TILE)]
                T.buffer_store(out, get(acc, r), where)

        return emit

    types = [*left_types, "int32", weight_type, "float32"]
    return _frame(target, types, shapes, len(left_types), attrs, body, nobody)


def experts_out(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, U F), ids and weights (M, U), packed weight (E C, F) -> (M, C), C = attrs width."""
    used = int(shapes[-4][1])
    columns = int(shapes[0][1]) * PER_WORD[kind] // used
    (*left_types, weight_type), make = reduction(kind, target, attrs["format"], columns)

    def body(buffers: list[Any]) -> Emit:
        *left, _, shares, weight, out = buffers

        def emit(tile: Any, expert: Any, pairs: _Pairs, count: int) -> None:
            reduce = make([*_slices(left, pairs, kind, attrs["format"], columns, used), weight])
            acc = reduce(_tile_of(expert, int(attrs["width"]) // TILE, tile), 0, count)
            for r in range(count):
                where = [pairs.rows[r], lanes(tile * TILE)]
                share = splat(shares[pairs.rows[r], pairs.places[r]])
                T.buffer_store(out, fma(share, get(acc, r), out[tuple(where)]), where)

        return emit

    types = [*left_types, "int32", "float32", weight_type, "float32"]
    return _frame(target, types, shapes, len(left_types), attrs, body, None)


def _slices(left: list[Any], pairs: _Pairs, kind: str, format: str, columns: int, used: int) -> list[_Picked]:
    """The left operands' columns of each pair's slice, as if they were all there is.

    Totals of codes are those of blocks of 32 columns, and after these, for all slices, of 16.
    """
    words = _Picked(left[0], pairs, columns // PER_WORD[kind])
    if kind != "i8":
        return [words]
    packing = FORMATS[format]
    assert isinstance(packing, BlockFormat)
    blocks = columns // BLOCK
    if packing.block == SUM_BLOCK:  # the reduction asks for totals of 16, which it expects after its own slice's of 32
        totals = _Picked(left[2], pairs, columns // SUM_BLOCK, (used - 1) * blocks)
    else:
        totals = _Picked(left[2], pairs, blocks)
    return [words, _Picked(left[1], pairs, blocks), totals]


def _tile_of(expert: Any, tiles: int, tile: Any) -> Any:
    """The tile of the stacked matrices that is the expert's `tile`; 64 bits, for all experts can have 2^31 words."""
    place = registers((1,), "int64")
    T.buffer_store(place, T.cast(expert, "int64") * tiles + T.cast(tile, "int64"), [0])
    return place[0]


def _frame(
    target: Target, dtypes: list[str], shapes: list[Any], ids_at: int, attrs: dict[str, Any],
    body: Callable[[list[Any]], Emit], nobody: Callable[[list[Any], Any, Any, Any], None] | None,
) -> tirx.PrimFunc:  # fmt: skip
    """The loops round `emit`: tiles in parallel, all pairs of operand `ids_at`.

    `nobody(buffers, tile, row, place)` is what becomes of a pair without an expert; where there is none, emit adds to
    an output that starts as zeros.
    """
    used = int(shapes[ids_at][1])
    with IRBuilder() as builder, T.prim_func():
        buffers = arguments(dtypes, shapes)
        emit, ids, out, rows = body(buffers), buffers[ids_at], buffers[-1], shapes[0][0]
        with parallel(target, int(attrs["width"]) // TILE) as tile:
            if nobody is None:
                with T.serial(0, rows) as row:
                    T.buffer_store(out, splat(f32(0)), [row, lanes(tile * TILE)])
            else:
                with T.serial(0, rows) as row, T.serial(0, used) as u, T.If(ids[row, u] < 0), T.Then():
                    nobody(buffers, tile, row, u)
            with T.If(rows < SORTED_ROWS):
                with T.Then():
                    pairs = _Pairs(1)
                    with T.serial(0, rows) as row, T.serial(0, used) as u, T.If(ids[row, u] >= 0), T.Then():
                        pairs.put(0, row, u)
                        emit(tile, ids[row, u], pairs, 1)
                with T.Else(), T.serial(0, T.ceildiv(rows, ROW_BLOCK)) as block:
                    first = block * ROW_BLOCK
                    count = T.min(rows - first, ROW_BLOCK)
                    _sorted_pairs(target, emit, tile, ids, first, count, used, int(attrs["experts"]))
    return builder.get()


def _sorted_pairs(
    target: Target, emit: Emit, tile: Any, ids: Any, first: Any, count: Any, used: int, experts: int
) -> None:
    """All pairs of `count` rows from `first` on, expert by expert, behind those that have none."""
    order = registers((ROW_BLOCK * used,), "int32")  # row * used + place, by expert
    ends, cursor = registers((experts + 1,), "int32"), registers((experts,), "int32")
    with T.serial(0, experts + 1) as e:
        T.buffer_store(ends, i32(0), [e])
    with T.serial(0, count) as row, T.serial(0, used) as u:
        after = ids[first + row, u] + 1
        T.buffer_store(ends, ends[after] + 1, [after])
    with T.serial(0, experts) as e:
        T.buffer_store(cursor, ends[e], [e])
        T.buffer_store(ends, ends[e] + ends[e + 1], [e + 1])
    with T.serial(0, count) as row, T.serial(0, used) as u, T.If(ids[first + row, u] >= 0), T.Then():
        expert = ids[first + row, u]
        T.buffer_store(order, T.cast(row, "int32") * used + T.cast(u, "int32"), [cursor[expert]])
        T.buffer_store(cursor, cursor[expert] + 1, [expert])
    pairs = _Pairs(group_rows(target) + MORE_ROWS)

    def some(expert: Any, start: Any, size: int) -> None:
        for r in range(size):
            pair = order[start + r]
            pairs.put(r, first + T.floordiv(pair, used), T.floormod(pair, used))
        emit(tile, expert, pairs, size)

    with T.serial(0, experts) as e:
        size, start = ends[e + 1] - ends[e], ends[e]
        in_groups(target, size, lambda at, count: some(e, start + at, count))


KERNELS: dict[str, Any] = {
    f"{kind}_experts_{way}": partial(make, kind)
    for kind in PER_WORD
    for way, make in (("in", experts_in), ("out", experts_out))
}
