"""The greatest logits of a row on CUDA, best first, and the log of the sum of e^logit: what sampling starts from.

A number and its column make a key, a whole number: a greater key comes first, and no two are alike, so the place of
one is the count of those that are greater. Blocks of a first launch have some columns of a row each, and leave the best
keys of these to a second launch, of which a block has a row.

Both find the best K in the same way (`_Best`). A few keys are offered, each with how many more are known to be no less:
counting these gives a bound that K keys are not below, and hardly more, as a rule, which are then counted against each
other.
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
COLUMNS, MOST_COLUMNS = 16, 64  # of a thread
BLOCKS = 32  # of a row, where that is no more columns than a thread may have
MERGING = 256  # threads that merge what blocks of a row have left, unless these are more
OFFERED = 8  # keys of what a block has left that may be offered
AT_ONCE = 8  # keys that are counted together
ARGMAX_THREADS = 512
_KEY = "uint64"
_SIGN, _INFINITE = 1 << 31, 0x7F800000  # bits of a float32
_LAST = (1 << 31) - 1  # beyond all columns


def _key(number: Any, column: Any) -> Any:
    """Above 0; greater for a greater number, of equal ones for a lower column; what is no number is below all.

    63 bits, so that the last bit of a difference says which key is greater. By the number's bits: TVM takes it for
    granted that a number is itself.
    """
    bits = held(T.reinterpret("uint32", held(number)), "uint32")
    ordered = T.Select(bits >= u32(_SIGN), u32(0) - bits, bits | u32(_SIGN))  # -0 and 0 are the same
    ordered = T.Select((bits & u32(_SIGN - 1)) > u32(_INFINITE), u32(1), ordered)
    return (T.cast(ordered, _KEY) << _constant(31)) | T.cast(i32(_LAST) - T.cast(column, "int32"), _KEY)


def _number(key: Any) -> Any:
    """The float32 of a key; 0 for -0."""
    ordered = held(T.cast(key >> _constant(31), "uint32"), "uint32")
    bits = T.Select(ordered >= u32(_SIGN), ordered ^ u32(_SIGN), u32(0) - ordered)
    return T.reinterpret("float32", held(bits, "uint32"))


def _column(key: Any) -> Any:
    """The column of a key."""
    return i32(_LAST) - T.cast(T.cast(key, "uint32") & u32(_LAST), "int32")


def _constant(value: int) -> Any:
    return tirx.const(value, _KEY)


class _Best:
    """The best `count` of the keys that threads of a block have, `each` in registers; 0 is no key.

    The first threads offer one key each, in groups: the one of a thread with `weights[thread in its group]` stands for
    so many keys that are not less, and that no other stands for. No more than `room` keys are above the bound, then.
    """

    def __init__(self, thread: Any, threads: int, each: int, count: int, weights: list[int], groups: int, room: int):
        self.thread, self.threads, self.each, self.count = thread, threads, each, count
        self.weights, self.groups = weights, groups
        self.keys, self.offer = local((each,), _KEY), local((1,), _KEY)
        self.offered = shared((groups * len(weights),), _KEY)
        self.bounds = shared((2,), _KEY)  # what no key of the best is less than, and the best
        self.found = shared((room + AT_ONCE,), _KEY)

    def keep(self, take: Callable[[Any, Any], None]) -> Any:
        """`take(place, key)` of each, by any thread; how many there are, or more than `count`."""
        self._bound()
        total = self._gather()
        with T.serial(0, T.floordiv(total + (self.threads - 1), self.threads), unroll=False) as turn:
            at = held(turn * self.threads + self.thread, "int32")
            with T.If(at < total), T.Then():
                own = held(self.found[at], _KEY)
                place = _greater(self.found, own, T.floordiv(total + (AT_ONCE - 1), AT_ONCE), [1] * AT_ONCE)
                with T.If(place < self.count), T.Then():
                    take(place, own)
        return total

    def _bound(self) -> None:
        """The bounds, by what is offered."""
        own, offers = self.offer[0], self.groups * len(self.weights)
        with T.If(self.thread < offers), T.Then():
            T.buffer_store(self.offered, own, [self.thread])
        with T.If(self.thread == 0), T.Then():
            T.buffer_store(self.bounds, _constant(1), [0])  # any key, where there are fewer
        barrier()
        before = _greater(self.offered, own, self.groups, self.weights)
        after = before + _chosen(self.thread % len(self.weights), self.weights)
        there = tirx.all(self.thread < offers, own > _constant(0))
        with T.If(tirx.all(there, before < self.count, after >= self.count)), T.Then():
            T.buffer_store(self.bounds, own, [0])
        with T.If(tirx.all(there, before == 0)), T.Then():
            T.buffer_store(self.bounds, own, [1])
        barrier()

    def _gather(self) -> Any:
        """The keys that are not below the bound to `found`, in the order of threads, and zeros; how many there are."""
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
        with T.If(self.thread < AT_ONCE), T.Then():
            T.buffer_store(self.found, _constant(0), [total[0] + self.thread])
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


def _greater(keys: Any, own: Any, groups: Any, weights: list[int]) -> Any:
    """The sum of weights of those of the first keys, in groups, that are greater than the thread's own."""
    place = local((1,), "int32")
    T.buffer_store(place, i32(0), [0])
    with T.serial(0, groups) as group:
        found = i32(0)  # by itself, so that few sums wait for the one before
        for i, weight in enumerate(weights):
            # Faster than comparing, of which nvcc makes a chain of moves.
            greater = T.cast((own - keys[group * len(weights) + i]) >> _constant(63), "int32")
            found = found + greater * weight
        T.buffer_store(place, place[0] + found, [0])
    return place[0]


def _chosen(number: Any, values: list[int]) -> Any:
    """values[number]."""
    found = i32(values[0])
    for i, value in enumerate(values[1:], 1):
        found = T.Select(number == i, i32(value), found)
    return found


def top(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> ids int32, values (M, K), log of the sum of e^x (M,). What is no number comes last."""
    (rows, width), count = shapes[0], int(shapes[1][1])
    each = min(MOST_COLUMNS, COLUMNS * -(-int(width) // (COLUMNS * THREADS * BLOCKS)))
    blocks = -(-int(width) // (each * THREADS))
    with IRBuilder() as builder, T.prim_func():
        x, ids, values, normalizers = arguments(["float32", "int32", "float32", "float32"], shapes)
        keys = T.alloc_buffer((rows, blocks, count), _KEY)  # of a block in order, and then zeros
        sums = T.alloc_buffer((rows, blocks), "float32")
        with launch({"blockIdx.x": rows, "blockIdx.y": blocks, "threadIdx.x": THREADS}) as (row, block, thread):
            _leave(x, keys, sums, (row, block, thread), each)
        offered = _offered(blocks, count)
        with launch({"blockIdx.x": rows, "threadIdx.x": width_threads(blocks * len(offered), 1024)}) as (row, thread):
            _merge(keys, sums, (ids, values, normalizers), (row, thread), offered)
    return builder.get()


def _leave(x: Any, keys: Any, sums: Any, place: tuple[Any, Any, Any], each: int) -> None:
    """A block's best keys of a row (`place`: row, block, thread), and the sum of e^(x - the greatest x) there."""
    (row, block, thread), width, count = place, int(x.shape[1]), int(keys.shape[2])
    # A thread offers its greatest key, for itself: what is not below the bound is then of `count` threads.
    best = _Best(thread, THREADS, each, count, [1] * AT_ONCE, THREADS // AT_ONCE, min(THREADS, count) * each)
    numbers, columns = local((each,)), [(block * each + i) * THREADS + thread for i in range(each)]
    for i, column in enumerate(columns):
        T.buffer_store(numbers, T.if_then_else(column < width, x[row, column], f32(float("-inf"))), [i])
    fill(best.offer, _constant(0))
    for i, column in enumerate(columns):
        T.buffer_store(best.keys, T.Select(column < width, _key(numbers[i], column), _constant(0)), [i])
        T.buffer_store(best.offer, T.Select(best.keys[i] > best.offer[0], best.keys[i], best.offer[0]), [0])
    total = best.keep(lambda at, key: T.buffer_store(keys, key, [row, block, at]))
    with T.If(tirx.all(thread >= total, thread < count)), T.Then():
        T.buffer_store(keys, _constant(0), [row, block, thread])
    most, powers = held(_number(best.bounds[1])), local((1,))
    least = held(T.Select(most == f32(float("-inf")), f32(0), most))  # e^(-inf) is 0, of -inf less -inf it is nothing
    T.buffer_store(powers, f32(0), [0])
    for i in range(each):
        T.buffer_store(powers, powers[0] + T.exp(numbers[i] - least), [0])
    block_reduce(powers, 0, thread, THREADS, added)
    with T.If(thread == 0), T.Then():
        T.buffer_store(sums, powers[0], [row, block])


def _offered(blocks: int, count: int) -> list[int]:
    """Which of the best keys that a block has left are offered, of so many blocks: fewer the further down."""
    most = max(1, min(OFFERED, MERGING // blocks))
    return sorted({round(count ** (i / max(1, most - 1))) - 1 for i in range(most)})


def _merge(
    keys: Any, sums: Any, results: tuple[Any, Any, Any], place: tuple[Any, Any], offered: list[int]
) -> None:  # fmt: skip
    """What blocks have left of a row (`place`: row, thread) to the results."""
    (row, thread), (ids, values, normalizers) = place, results
    blocks, count, sharing = int(keys.shape[1]), int(keys.shape[2]), len(offered)
    block, first = T.floordiv(thread, sharing), thread % sharing
    weights = [at - before for at, before in zip(offered, [-1, *offered], strict=False)]
    # Of a block that keys stand for, some more may be above the bound: those before the next one that it offers.
    beyond = max(-(-after // (at + 1)) for at, after in zip(offered, [*offered[1:], count], strict=True))
    threads = width_threads(blocks * sharing, 1024)
    best = _Best(thread, threads, -(-count // sharing), count, weights, blocks, (beyond + 1) * count)

    def key(at: Any) -> Any:
        there = tirx.all(block < blocks, at < count)
        return T.if_then_else(there, keys[row, block, at], _constant(0))

    T.buffer_store(best.offer, key(_chosen(first, offered)), [0])
    for i in range(best.each):
        T.buffer_store(best.keys, key(first + i * sharing), [i])
    own, part = tirx.all(block < blocks, first == 0), local((1,))  # it offers the best of a block
    T.buffer_store(part, T.if_then_else(own, sums[row, block], f32(0)), [0])

    def take(at: Any, key: Any) -> None:
        T.buffer_store(ids, _column(key), [row, at])
        T.buffer_store(values, _number(key), [row, at])

    best.keep(take)
    most = held(_number(best.bounds[1]))
    with T.If(own), T.Then():
        T.buffer_store(part, part[0] * T.exp(_number(best.offer[0]) - most), [0])
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
