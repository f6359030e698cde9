"""The greatest logits of a row on CUDA, best first, and the log of the sum of e^logit: what sampling starts from.

A number and its column make a key, a whole number: a greater key comes first, and no two are alike, so the place of
one is the count of those that are greater. Blocks of a first launch have some columns of a row each, and leave the best
keys of these to a second launch, of which a block has a row.

Both find the best K in the same way (`_Best`). The greatest keys of threads, in order, bound them: what is less than
that in place K is not among the best, so they are keys of K threads. These are hardly more than K, as a rule, and are
counted against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import (
    added,
    barrier,
    block_reduce,
    f32,
    fill,
    held,
    i32,
    launch,
    local,
    row_kernel,
    shared,
    shuffled,
    strided,
    u32,
    width_threads,
)
from llmc.targets.cuda.target import WARP, CudaTarget

THREADS = 128  # of a block of columns: few, for each one's greatest key is counted against all the others'
COLUMNS = 16  # of a thread, or a multiple of that
MOST_BLOCKS = 128  # of a row
MOST_MERGING = 256  # threads that merge what blocks of a row have left
MOST_SHARING = 8  # of these, that share what one block has left
ARGMAX_THREADS = 512
_KEY = "uint64"
_SIGN, _INFINITE, _LAST = 1 << 31, 0x7F800000, (1 << 32) - 1  # bits of a float32, and the last uint32


def _key(number: Any, column: Any) -> Any:
    """Above 0; greater for a greater number, of equal ones for a lower column; what is no number is below all.

    By its bits: that a number is itself, TVM takes for granted.
    """
    bits = held(T.reinterpret("uint32", held(number)), "uint32")
    ordered = T.Select(bits >= u32(_SIGN), u32(0) - bits, bits | u32(_SIGN))  # -0 and 0 are the same
    ordered = T.Select((bits & u32(_SIGN - 1)) > u32(_INFINITE), u32(1), ordered)
    return (T.cast(ordered, _KEY) << _constant(32)) | T.cast(u32(_LAST) - T.cast(column, "uint32"), _KEY)


def _number(key: Any) -> Any:
    """The float32 of a key; 0 for -0."""
    ordered = held(T.cast(key >> _constant(32), "uint32"), "uint32")
    bits = T.Select(ordered >= u32(_SIGN), ordered ^ u32(_SIGN), u32(0) - ordered)
    return T.reinterpret("float32", held(bits, "uint32"))


def _column(key: Any) -> Any:
    """The column of a key."""
    return T.cast(u32(_LAST) - T.cast(key, "uint32"), "int32")


def _constant(value: int) -> Any:
    return tirx.const(value, _KEY)


class _Best:
    """The best `count` of the keys that threads of a block have, `each` in registers; 0 is no key."""

    def __init__(self, thread: Any, threads: int, each: int, count: int) -> None:
        self.thread, self.threads, self.each, self.count = thread, threads, each, count
        self.keys = local((each,), _KEY)
        self.offered = shared((threads,), _KEY)
        self.bounds = shared((2,), _KEY)  # what no key of the best is less than, and the best
        self.found = shared((min(threads, count) * each,), _KEY)

    def keep(self, take: Callable[[Any, Any], None]) -> Any:
        """`take(place, key)` of each, by any thread; how many found a place, or more than `count`."""
        self._bound()
        total = self._gather()
        with T.serial(0, T.floordiv(total + (self.threads - 1), self.threads), unroll=False) as turn:
            at = held(turn * self.threads + self.thread, "int32")
            with T.If(at < total), T.Then():
                own = held(self.found[at], _KEY)
                place = self._greater(self.found, own, total)
                with T.If(place < self.count), T.Then():
                    take(place, own)
        return total

    def _greater(self, keys: Any, own: Any, count: Any) -> Any:
        """How many of the first `count` keys are greater than the thread's own."""
        place = local((1,), "int32")
        T.buffer_store(place, i32(0), [0])
        with T.serial(0, count, unroll=8) as other:
            T.buffer_store(place, place[0] + T.Select(keys[other] > own, i32(1), i32(0)), [0])
        return place[0]

    def _bound(self) -> None:
        """The bounds, by threads' greatest keys."""
        own = local((1,), _KEY)
        T.buffer_store(own, self.keys[0], [0])
        for i in range(1, self.each):
            T.buffer_store(own, T.Select(self.keys[i] > own[0], self.keys[i], own[0]), [0])
        T.buffer_store(self.offered, own[0], [self.thread])
        with T.If(self.thread == 0), T.Then():
            T.buffer_store(self.bounds, _constant(1), [0])  # any key, where fewer threads have one
        barrier()
        place = self._greater(self.offered, own[0], self.threads)
        for bound, wanted in enumerate((self.count - 1, 0)):
            with T.If(tirx.all(place == wanted, own[0] > _constant(0))), T.Then():
                T.buffer_store(self.bounds, own[0], [bound])
        barrier()

    def _gather(self) -> Any:
        """The keys that are not below the bound to `found`, in the order of threads; how many there are."""
        bound = held(self.bounds[0], _KEY)
        own = local((1,), "int32")
        fill(own, i32(0))
        for i in range(self.each):
            T.buffer_store(own, own[0] + T.Select(self.keys[i] >= bound, i32(1), i32(0)), [0])
        before, total = self._counted(own[0])
        for i in range(self.each):
            with T.If(self.keys[i] >= bound), T.Then():
                T.buffer_store(self.found, self.keys[i], [before[0]])
                T.buffer_store(before, before[0] + 1, [0])
        barrier()
        return total[0]

    def _counted(self, own: Any) -> tuple[Any, Any]:
        """The sum of numbers of threads before this one, and of all."""
        lane, warp, warps = self.thread % WARP, T.floordiv(self.thread, WARP), self.threads // WARP
        before, total = local((1,), "int32"), local((1,), "int32")
        T.buffer_store(before, i32(0), [0])
        T.buffer_store(total, own, [0])
        lanes = 1
        while lanes < WARP:  # so many lanes beside each other have the same total, those of the other half come to it
            other = shuffled(total[0], lanes, "int32")
            T.buffer_store(before, before[0] + T.Select((lane & lanes) != 0, other, i32(0)), [0])
            T.buffer_store(total, total[0] + other, [0])
            lanes *= 2
        totals = shared((warps,), "int32")
        with T.If(lane == 0), T.Then():
            T.buffer_store(totals, total[0], [warp])
        barrier()
        T.buffer_store(total, i32(0), [0])
        for each in range(warps):
            T.buffer_store(before, before[0] + T.Select(each < warp, totals[each], i32(0)), [0])
            T.buffer_store(total, total[0] + totals[each], [0])
        return before, total


class _Columns:
    """How blocks share the columns of a row: a thread has four that stand together, where rows begin at multiples."""

    def __init__(self, width: int) -> None:
        self.width, self.together = width, 4 if width % 4 == 0 else 1
        self.each = COLUMNS * -(-width // (COLUMNS * THREADS * MOST_BLOCKS))  # of a thread
        self.blocks = -(-width // (self.each * THREADS))

    def column(self, block: Any, thread: Any, i: int) -> Any:
        """Where the thread's number `i` stands."""
        step, at = divmod(i, self.together)
        turn = block * (self.each // self.together) + step
        return T.cast((turn * THREADS + thread) * self.together + at, "int32")

    def read(self, x: Any, row: Any, block: Any, thread: Any) -> Any:
        """The thread's numbers; -inf beyond the last column."""
        numbers, together = local((self.each,)), self.together
        fill(numbers, f32(float("-inf")))
        for i in range(0, self.each, together):
            column = self.column(block, thread, i)
            place = T.ramp(column, 1, together) if together > 1 else column
            with T.If(column < self.width), T.Then():
                T.buffer_store(numbers, x[row, place], [T.ramp(i, 1, together) if together > 1 else i])
        return numbers


def top(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> ids int32, values (M, K), log of the sum of e^x (M,). What is no number comes last."""
    (rows, width), count = shapes[0], int(shapes[1][1])
    columns = _Columns(int(width))
    with IRBuilder() as builder, T.prim_func():
        x, ids, values, normalizers = arguments(["float32", "int32", "float32", "float32"], shapes)
        keys = T.alloc_buffer((rows, columns.blocks, count), _KEY)  # of a block in order, and then zeros
        sums = T.alloc_buffer((rows, columns.blocks), "float32")
        grid = {"blockIdx.x": rows, "blockIdx.y": columns.blocks, "threadIdx.x": THREADS}
        with launch(grid) as (row, block, thread):
            _leave(columns, x, keys, sums, (row, block, thread))
        with launch({"blockIdx.x": rows, "threadIdx.x": _merging(columns.blocks)[0]}) as (row, thread):
            _merge(keys, sums, (ids, values, normalizers), (row, thread))
    return builder.get()


def _leave(columns: _Columns, x: Any, keys: Any, sums: Any, place: tuple[Any, Any, Any]) -> None:
    """A block's best keys of a row (`place`: row, block, thread), and the sum of e^(x - the greatest x) there."""
    row, block, thread = place
    count = int(keys.shape[2])
    best = _Best(thread, THREADS, columns.each, count)
    numbers = columns.read(x, row, block, thread)
    for i in range(columns.each):
        column = columns.column(block, thread, i)
        there = columns.column(block, thread, i - i % columns.together) < columns.width
        T.buffer_store(best.keys, T.Select(there, _key(numbers[i], column), _constant(0)), [i])
    total = best.keep(lambda at, key: T.buffer_store(keys, key, [row, block, at]))
    with T.If(tirx.all(thread >= total, thread < count)), T.Then():
        T.buffer_store(keys, _constant(0), [row, block, thread])
    most, powers = held(_number(best.bounds[1])), local((1,))
    least = held(T.Select(most == f32(float("-inf")), f32(0), most))  # e^(-inf) is 0, of -inf less -inf it is nothing
    T.buffer_store(powers, f32(0), [0])
    for i in range(columns.each):
        T.buffer_store(powers, powers[0] + T.exp(numbers[i] - least), [0])
    block_reduce(powers, 0, thread, THREADS, added)
    with T.If(thread == 0), T.Then():
        T.buffer_store(sums, powers[0], [row, block])


def _merging(blocks: int) -> tuple[int, int]:
    """Threads that merge what so many blocks have left, and how many of them share what one has."""
    sharing = min(MOST_SHARING, MOST_MERGING // blocks)
    return width_threads(blocks * sharing, MOST_MERGING), sharing


def _merge(keys: Any, sums: Any, results: tuple[Any, Any, Any], place: tuple[Any, Any]) -> None:
    """What blocks have left of a row (`place`: row, thread) to the results. A thread has some keys of one."""
    (row, thread), (ids, values, normalizers) = place, results
    blocks, count = (int(size) for size in keys.shape[1:])
    threads, sharing = _merging(blocks)
    block, first = T.floordiv(thread, sharing), thread % sharing
    best = _Best(thread, threads, -(-count // sharing), count)
    part = local((1,))
    T.buffer_store(part, f32(0), [0])
    for i in range(best.each):
        at = first + i * sharing
        there = tirx.all(block < blocks, at < count)
        T.buffer_store(best.keys, T.if_then_else(there, keys[row, block, at], _constant(0)), [i])
    with T.If(tirx.all(block < blocks, first == 0)), T.Then():
        T.buffer_store(part, sums[row, block], [0])

    def take(at: Any, key: Any) -> None:
        T.buffer_store(ids, _column(key), [row, at])
        T.buffer_store(values, _number(key), [row, at])

    best.keep(take)
    most = held(_number(best.bounds[1]))
    with T.If(tirx.all(block < blocks, first == 0)), T.Then():
        T.buffer_store(part, part[0] * T.exp(_number(best.keys[0]) - most), [0])  # its first key is the block's best
    block_reduce(part, 0, thread, threads, added)
    with T.If(thread == 0), T.Then():
        T.buffer_store(normalizers, most + T.log(part[0]), [row])


def argmax(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> the first index of the greatest value (M,). A row without any number gives 0."""
    width, warps = int(shapes[0][1]), ARGMAX_THREADS // WARP

    def body(buffers: list[Any], row: Any, thread: Any) -> None:
        x, out = buffers
        best, winners = local((1,), _KEY), shared((warps,), _KEY)

        def offer(key: Any) -> None:
            T.buffer_store(best, T.Select(key > best[0], key, best[0]), [0])

        T.buffer_store(best, _constant(0), [0])
        strided(width, thread, ARGMAX_THREADS, lambda c: offer(held(_key(held(x[row, c]), c), _KEY)))
        distance = WARP // 2
        while distance:
            offer(shuffled(best[0], distance, _KEY))
            distance //= 2
        with T.If(thread % WARP == 0), T.Then():
            T.buffer_store(winners, best[0], [T.floordiv(thread, WARP)])
        barrier()
        with T.If(thread == 0), T.Then():
            for warp in range(1, warps):
                offer(winners[warp])
            T.buffer_store(out, _column(best[0]), [row])

    return row_kernel(["float32", "int32"], shapes, ARGMAX_THREADS, body)
