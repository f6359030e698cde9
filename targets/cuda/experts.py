"""Matrices of experts on CUDA: a row is multiplied with those that it was routed to, by the products of linear layers.

A pair is a row and a place among the experts it uses. Of a few rows, each pair goes by itself. Of more, pairs that have
an expert in common go in groups that share each weight that is read. Each pair is summed by itself, and a row's pairs
are added in the order of their experts, so that its bits never depend on the rows beside it. A pair whose id is below 0
has no expert.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import barrier, f32, fill, fma, i32, launch, local, shared, strided
from llmc.targets.cuda.products import LEFT, THREADS, WORKERS, Slices, matrix_dtype, multiply, parts_of, put, total
from llmc.targets.cuda.target import WARP, CudaTarget
from llmc.targets.cuda.weights import Weights

SORTED_ROWS = 4  # from so many on pairs of an expert share its weights
GROUP = WORKERS  # pairs that do: each worker then puts one together
FOUND = 1024  # pairs among which a block looks for those of its expert
SORTED, MOST_ROWS = 512, 64  # pairs that a block sorts by expert, and rows that it sums these up for
_WARPS = THREADS // WARP
_WIDE = 1 << 31  # numbers of a matrix from which on places in it need 64 bits


class _Experts:
    """The matrices of all experts, one under another, and the rows of x that go through them."""

    def __init__(self, kind: str, attrs: dict[str, Any], columns: int, x: Any, ids: Any, weight: Any) -> None:
        self.format, self.columns, self.ids, self.weight = str(attrs["format"]), columns, ids, weight
        self.count, self.used = int(attrs["experts"]), int(ids.shape[1])
        self.tiles = int(attrs["width"]) // TILE  # of an expert
        self.left = Slices(kind, x, columns, columns)
        self.rows = ids.shape[0]
        self.wide = math.prod(map(int, weight.shape)) >= _WIDE

    def begin(self, thread: Any) -> None:
        """What threads of a block make together before the first product."""
        self.thread, self.weights = thread, Weights(self.format, self.columns, thread, THREADS)

    def multiply(self, expert: Any, tile: Any, sums: Any, rows: Any, slices: Any) -> None:
        """sums = the thread's part of products of one tile of an expert, zeros of one below 0."""
        fill(sums, f32(0))
        at = T.cast(expert, "int64") * self.tiles + T.cast(tile, "int64") if self.wide else expert * self.tiles + tile
        with T.If(expert >= 0), T.Then():
            multiply(self.weights, self.weight, at, self.thread, self.left, sums, rows, slices)

    def chunks(self, size: int) -> Any:
        """Blocks that take so many rows each."""
        return T.floordiv(self.rows + size - 1, size)


def _held(value: Any) -> Any:
    """An int32 computed once."""
    one = local((1,), "int32")
    T.buffer_store(one, value, [0])
    return one


def experts_in(kind: str, target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) float32 or bfloat16 pairs, ids (M, U), packed weight (E F, C) -> (M, U F), F = attrs width."""
    columns = int(shapes[0][1]) * (2 if kind == "bf16" else 1)
    with IRBuilder() as builder, T.prim_func():
        x, ids, weight, out = arguments([LEFT[kind], "int32", matrix_dtype(str(attrs["format"])), "float32"], shapes)
        experts = _Experts(kind, attrs, columns, x, ids, weight)
        with T.If(experts.rows < SORTED_ROWS):
            with T.Then():
                _each_in(experts, out)
            with T.Else():
                _shared_in(experts, out)
    return builder.get()


def _each_in(experts: _Experts, out: Any) -> None:
    """A block a tile and pair."""
    grid = {"blockIdx.x": experts.tiles, "blockIdx.y": experts.rows, "blockIdx.z": experts.used}
    with launch({**grid, "threadIdx.x": THREADS}) as (tile, row, place, thread):
        experts.begin(thread)
        sums, parts = local((1,)), parts_of(1)
        experts.multiply(_held(experts.ids[row, place])[0], tile, sums, _held(row), _held(i32(0)))
        put(parts, thread, sums)
        with T.If(thread < TILE), T.Then():
            T.buffer_store(out, total(parts, 0, thread), [row, (place * experts.tiles + tile) * TILE + thread])


def _shared_in(experts: _Experts, out: Any) -> None:
    """A block a tile, an expert (the first is none) and a chunk of rows: its pairs, some at a time."""
    used, chunk = experts.used, max(1, FOUND // experts.used)
    grid = {"blockIdx.x": experts.tiles, "blockIdx.y": experts.count + 1, "blockIdx.z": experts.chunks(chunk)}
    with launch({**grid, "threadIdx.x": THREADS}) as (tile, which, block, thread):
        experts.begin(thread)
        sums, parts = local((GROUP,)), parts_of(GROUP)
        rows, slices = shared((GROUP,), "int32"), local((GROUP,), "int32")  # as on the way out
        fill(slices, i32(0))
        pairs, count = _find(experts, which - 1, block * chunk, chunk)
        with T.serial(0, T.floordiv(count + GROUP - 1, GROUP)) as step:
            with T.If(thread < GROUP), T.Then():
                # A pair beyond the last one computes the last one again, and is not written.
                pair = _held(pairs[T.min(step * GROUP + thread, count - 1)])[0]
                T.buffer_store(rows, block * chunk + T.floordiv(pair, used), [thread])
            barrier()
            experts.multiply(which - 1, tile, sums, rows, slices)
            put(parts, thread, sums)
            own, column = T.floordiv(thread, TILE), T.floormod(thread, TILE)
            with T.If(step * GROUP + own < count), T.Then():
                pair = _held(pairs[step * GROUP + own])[0]
                at = (T.floormod(pair, used) * experts.tiles + tile) * TILE + column
                T.buffer_store(out, total(parts, own, column), [block * chunk + T.floordiv(pair, used), at])
            barrier()  # before parts are written again


def _find(experts: _Experts, expert: Any, first: Any, chunk: int) -> tuple[Any, Any]:
    """(pairs, how many): row * used + place of those of an expert, of the rows of a chunk, in order."""
    thread, used = experts.thread, experts.used
    each = -(-chunk * used // THREADS)  # pairs that a thread looks at, one after another
    here = T.min(T.cast(experts.rows, "int32") - first, chunk) * used

    def own(found: Any) -> None:
        with T.serial(0, each) as i:
            pair = thread * each + i
            id = experts.ids[first + T.floordiv(pair, used), T.floormod(pair, used)]
            with T.If(tirx.all(pair < here, T.max(id, i32(-1)) == expert)), T.Then():
                found(pair)

    counted = _held(i32(0))
    own(lambda pair: T.buffer_store(counted, counted[0] + 1, [0]))
    at, count = _places(counted, thread)
    pairs = shared((chunk * used,), "int32")

    def put_pair(pair: Any) -> None:
        T.buffer_store(pairs, pair, [at[0]])
        T.buffer_store(at, at[0] + 1, [0])

    own(put_pair)
    barrier()
    return pairs, count[0]


def _places(counted: Any, thread: Any) -> tuple[Any, Any]:
    """The sum of what threads before this one counted, and that of all, in registers."""
    before, count, warps = _held(i32(0)), _held(i32(0)), shared((_WARPS,), "int32")
    distance = 1
    while distance < WARP:  # counted becomes the sum of 2, 4, 8... neighbours
        lanes = tirx.const(0xFFFFFFFF, "uint32")
        other = _held(T.tvm_warp_shuffle_xor(lanes, counted[0], distance, WARP, WARP))
        is_after = T.floormod(T.floordiv(thread, distance), 2) == 1
        T.buffer_store(before, before[0] + T.Select(is_after, other[0], i32(0)), [0])
        T.buffer_store(counted, counted[0] + other[0], [0])
        distance *= 2
    with T.If(T.floormod(thread, WARP) == 0), T.Then():
        T.buffer_store(warps, counted[0], [T.floordiv(thread, WARP)])
    barrier()
    for warp in range(_WARPS):
        is_before = T.floordiv(thread, WARP) > warp
        T.buffer_store(before, before[0] + T.Select(is_before, warps[warp], i32(0)), [0])
        T.buffer_store(count, count[0] + warps[warp], [0])
    return before, count


def experts_out(kind: str, target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, U F), ids and weights (M, U), packed weight (E C, F) -> (M, C), C = attrs width."""
    columns = int(shapes[0][1]) * (2 if kind == "bf16" else 1) // int(shapes[1][1])
    with IRBuilder() as builder, T.prim_func():
        dtypes = [LEFT[kind], "int32", "float32", matrix_dtype(str(attrs["format"])), "float32"]
        x, ids, shares, weight, out = arguments(dtypes, shapes)
        experts = _Experts(kind, attrs, columns, x, ids, weight)
        with T.If(experts.rows < SORTED_ROWS):
            with T.Then():
                _each_out(experts, shares, out)
            with T.Else():
                _shared_out(experts, shares, out)
    return builder.get()


def _each_out(experts: _Experts, shares: Any, out: Any) -> None:
    """A block a tile and row: its experts one after another."""
    with launch({"blockIdx.x": experts.tiles, "blockIdx.y": experts.rows, "threadIdx.x": THREADS}) as (
        tile,
        row,
        thread,
    ):
        experts.begin(thread)
        sums, parts, own = local((1,)), parts_of(experts.used), local((1,))
        with T.serial(0, experts.used) as place:
            experts.multiply(_held(experts.ids[row, place])[0], tile, sums, _held(row), _held(place))
            T.buffer_store(parts, sums[0], [place, T.floordiv(thread, TILE), T.floormod(thread, TILE)])
        barrier()
        T.buffer_store(own, f32(0), [0])
        with T.If(thread < TILE), T.Then():
            with T.serial(0, experts.used) as place, T.If(experts.ids[row, place] >= 0), T.Then():
                T.buffer_store(own, fma(shares[row, place], total(parts, place, thread), own[0]), [0])
            T.buffer_store(out, own[0], [row, tile * TILE + thread])


def _shared_out(experts: _Experts, shares: Any, out: Any) -> None:
    """A block a tile and a chunk of rows: their pairs by expert, some at a time, added to rows of shared memory."""
    used = experts.used
    chunk = max(1, min(MOST_ROWS, SORTED // used))
    with launch({"blockIdx.x": experts.tiles, "blockIdx.y": experts.chunks(chunk), "threadIdx.x": THREADS}) as (
        tile,
        block,
        thread,
    ):
        experts.begin(thread)
        column, worker = T.floormod(thread, TILE), T.floordiv(thread, TILE)
        sums, parts, totals = local((GROUP,)), parts_of(GROUP), shared((GROUP, TILE))
        rows, places = (shared((GROUP,), "int32") for _ in range(2))  # not in registers, of which ptxas is short
        result = shared((chunk, TILE))
        zero = partial(T.buffer_store, result, f32(0))
        strided(chunk * TILE, thread, THREADS, lambda i: zero([T.floordiv(i, TILE), T.floormod(i, TILE)]))
        order, ends = _sort(experts, block * chunk, chunk)
        with T.serial(0, experts.count) as expert:
            first, size = _held(ends[expert]), _held(ends[expert + 1] - ends[expert])
            with T.serial(0, T.floordiv(size[0] + GROUP - 1, GROUP)) as step:
                with T.If(thread < GROUP), T.Then():
                    pair = _held(order[first[0] + T.min(step * GROUP + thread, size[0] - 1)])[0]
                    T.buffer_store(rows, block * chunk + T.floordiv(pair, used), [thread])
                    T.buffer_store(places, T.floormod(pair, used), [thread])
                barrier()
                experts.multiply(expert, tile, sums, rows, places)
                put(parts, thread, sums)
                T.buffer_store(totals, total(parts, worker, column), [worker, column])
                barrier()
                # One thread adds up an output of all rows: a row may use an expert twice.
                with T.If(worker == 0), T.Then(), T.serial(0, T.min(size[0] - step * GROUP, GROUP)) as m:
                    pair = _held(order[first[0] + step * GROUP + m])[0]
                    own, place = T.floordiv(pair, used), T.floormod(pair, used)
                    more = fma(shares[block * chunk + own, place], totals[m, column], result[own, column])
                    T.buffer_store(result, more, [own, column])
        barrier()

        def write(i: Any) -> None:
            own, at = T.floordiv(i, TILE), T.floormod(i, TILE)
            with T.If(block * chunk + own < experts.rows), T.Then():
                T.buffer_store(out, result[own, at], [block * chunk + own, tile * TILE + at])

        strided(chunk * TILE, thread, THREADS, write)


def _sort(experts: _Experts, first: Any, chunk: int) -> tuple[Any, Any]:
    """(order, ends): row * used + place of all pairs of a chunk by expert; those of e from ends[e] to ends[e + 1]."""
    thread, used, most = experts.thread, experts.used, chunk * experts.used
    ids, order, ends = (shared((size,), "int32") for size in (most, most, experts.count + 1))
    here = _held(T.min(T.cast(experts.rows, "int32") - first, chunk) * used)[0]

    def copy(pair: Any) -> None:
        with T.If(pair < here), T.Then():
            T.buffer_store(ids, experts.ids[first + T.floordiv(pair, used), T.floormod(pair, used)], [pair])

    def count(expert: Any) -> None:
        below = _held(i32(0))
        with T.serial(0, here) as pair, T.If(ids[pair] < expert), T.Then():
            T.buffer_store(below, below[0] + 1, [0])
        T.buffer_store(ends, below[0], [expert])

    def put_pair(pair: Any) -> None:
        with T.If(tirx.all(pair < here, ids[T.min(pair, most - 1)] >= 0)), T.Then():
            at = _held(ends[ids[pair]])
            with T.serial(0, pair) as before, T.If(ids[before] == ids[pair]), T.Then():
                T.buffer_store(at, at[0] + 1, [0])
            T.buffer_store(order, pair, [at[0]])

    strided(most, thread, THREADS, copy)
    barrier()
    strided(experts.count + 1, thread, THREADS, count)
    barrier()
    strided(most, thread, THREADS, put_pair)
    barrier()
    return order, ends


KERNELS: dict[str, Any] = {
    f"{kind}_experts_{way}": partial(make, kind)
    for kind in LEFT
    for way, make in (("in", experts_in), ("out", experts_out))
}
