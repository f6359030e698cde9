"""CUDA kernels that decide which experts a row goes through: a warp a row, its experts in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.elementwise import ACTIVATIONS, column_kernel
from llmc.targets.cuda.launch import (
    added,
    barrier,
    f32,
    greater,
    i32,
    local,
    row_kernel,
    shared,
    strided,
    warp_reduce,
)  # fmt: skip
from llmc.targets.cuda.target import WARP, CudaTarget

LOWEST = float("-inf")
_sigmoid = ACTIVATIONS["sigmoid"]


def gate_rows(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), gate (M, N) -> x * sigmoid(gate) (M, C), each of N slices of a row by its own."""
    width = int(shapes[0][1]) // int(shapes[1][1])

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        x, gate, out = buffers
        T.buffer_store(out, x[row, column] * _sigmoid(gate[row, T.floordiv(column, width)]), [row, column])

    return column_kernel(["float32"] * 3, shapes, body)


def route(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """logits (M, E), bias (E,) -> ids (M, U), weights (M, U). Ids are those of experts whatever the logits are."""
    count, used = int(shapes[0][1]), int(attrs["used"])

    def body(buffers: list[Any], row: Any, lane: Any) -> None:
        logits, bias, ids, weights = buffers
        made = _Row(lane, count, used)
        if attrs["routing"] == "sparse_mixer":
            made.mix_sparsely(logits, row, float(attrs["tolerance"]))
        else:
            made.choose(logits, bias, row, attrs)
        made.write(ids, weights, row, float(attrs["scale"]) if attrs["routing"] != "sparse_mixer" else 1.0)

    return row_kernel(["float32", "float32", "int32", "float32"], shapes, WARP, body)


class _Row:
    """A row's choice: `used` experts in the order they were found, then in their own, and their weights."""

    def __init__(self, lane: Any, count: int, used: int) -> None:
        self.lane, self.count, self.used = lane, count, used
        self.scores, self.choice = shared((count,)), shared((count,))
        self.found, self.shares = shared((used,), "int32"), shared((used,))

    def each(self, body: Any) -> None:
        """Of every expert, by a lane that is always the same."""
        strided(self.count, self.lane, WARP, body)

    def each_chosen(self, body: Any) -> None:
        strided(self.used, self.lane, WARP, body)

    def choose(self, logits: Any, bias: Any, row: Any, attrs: dict[str, Any]) -> None:
        """The best by scores and bias, and their weights by scores alone."""
        routing = attrs["routing"]
        sigmoid = routing == "sigmoid"
        first: Callable[[Any], Any] = _sigmoid if sigmoid else lambda x: x
        self.each(lambda e: T.buffer_store(self.scores, first(logits[row, e]), [e]))
        if routing == "softmax":
            _softmax(self.each, self.scores)
        self.each(lambda e: T.buffer_store(self.choice, self.scores[e] + bias[e], [e]))
        if attrs["groups"] > 1:
            self._close_groups(int(attrs["groups"]), int(attrs["groups_used"]), 2 if sigmoid else 1)
        with T.serial(0, self.used) as place:
            self._take(self.choice, place)
        self._order(self.scores)
        if routing == "sigmoid_of_chosen":
            self.each_chosen(lambda u: T.buffer_store(self.shares, _sigmoid(self.shares[u]), [u]))
        if routing == "softmax_of_chosen":
            _softmax(self.each_chosen, self.shares)
        elif attrs["renormalize"]:
            whole = _reduced(self.each_chosen, f32(0), lambda u: self.shares[u], added) + f32(1e-20)
            self.each_chosen(lambda u: T.buffer_store(self.shares, self.shares[u] / whole, [u]))

    def mix_sparsely(self, logits: Any, row: Any, tolerance: float) -> None:
        """Experts one after another: the best that is left, weighed among those left that are hardly worse."""
        left, weights = self.choice, self.scores
        self.each(lambda e: T.buffer_store(left, logits[row, e], [e]))
        self.each(lambda e: T.buffer_store(weights, f32(0), [e]))
        barrier()
        with T.serial(0, self.used) as place:
            value, best = self._best(left)

            def power(e: Any, value: Any = value) -> Any:
                size = T.max(T.fabs(logits[row, e]), value[0])
                is_near = (value[0] - left[e]) / size <= f32(2 * tolerance)
                return T.Select(is_near, T.exp(left[e] - value[0]), f32(0))

            whole = _reduced(self.each, f32(0), power, added)
            self._own(best, lambda e, whole=whole, power=power: T.buffer_store(weights, power(e) / whole, [e]))
            self._mark(left, best, place)
        self._order(weights)

    def _best(self, x: Any) -> tuple[Any, Any]:
        """(number, expert) of the greatest of x, the first of equals; where there is no number, `count`. In registers.

        All lanes have read x before it returns, and none may have written it since the last barrier, but its own part.
        """
        value, best = local((1,)), local((1,), "int32")
        T.buffer_store(value, f32(LOWEST), [0])
        T.buffer_store(best, i32(self.count), [0])

        def offer(number: Any, expert: Any) -> None:
            offered, other = local((1,)), local((1,), "int32")
            T.buffer_store(offered, number, [0])
            T.buffer_store(other, expert, [0])
            is_first = tirx.all(offered[0] == value[0], other[0] < best[0], offered[0] > f32(LOWEST))
            with T.If(tirx.any(offered[0] > value[0], is_first)), T.Then():
                T.buffer_store(value, offered[0], [0])
                T.buffer_store(best, other[0], [0])

        self.each(lambda e: offer(x[e], e))
        lanes, distance = tirx.const(0xFFFFFFFF, "uint32"), WARP // 2
        while distance:
            number = T.tvm_warp_shuffle_xor(lanes, value[0], distance, WARP, WARP)
            expert = T.tvm_warp_shuffle_xor(lanes, best[0], distance, WARP, WARP)
            offer(number, expert)
            distance //= 2
        return value, best

    def _own(self, best: Any, body: Any) -> None:
        """`body(expert)` by the lane that has it."""
        with T.If(tirx.all(best[0] < self.count, T.floormod(best[0], WARP) == self.lane)), T.Then():
            body(best[0])

    def _mark(self, x: Any, best: Any, place: Any) -> None:
        """An expert is found, and no longer in x; where there is none, the one of this place stands for it."""
        self._own(best, lambda e: T.buffer_store(x, f32(LOWEST), [e]))
        with T.If(self.lane == 0), T.Then():
            T.buffer_store(self.found, T.Select(best[0] < self.count, best[0], T.cast(place, "int32")), [place])

    def _take(self, x: Any, place: Any) -> None:
        self._mark(x, self._best(x)[1], place)

    def _order(self, weights: Any) -> None:
        """The experts found in ascending order, with their weights."""
        ordered = shared((self.used,), "int32")
        barrier()

        def one(u: Any) -> None:
            at = local((1,), "int32")
            T.buffer_store(at, i32(0), [0])
            with T.serial(0, self.used) as other:
                is_equal = tirx.all(self.found[other] == self.found[u], other < u)
                with T.If(tirx.any(self.found[other] < self.found[u], is_equal)), T.Then():
                    T.buffer_store(at, at[0] + 1, [0])
            T.buffer_store(ordered, self.found[u], [at[0]])
            T.buffer_store(self.shares, weights[self.found[u]], [at[0]])

        self.each_chosen(one)
        barrier()
        self.found = ordered

    def write(self, ids: Any, weights: Any, row: Any, scale: float) -> None:
        """The choice, as it is now."""

        def one(u: Any) -> None:
            T.buffer_store(ids, self.found[u], [row, u])
            T.buffer_store(weights, self.shares[u] * f32(scale), [row, u])

        self.each_chosen(one)

    def _close_groups(self, groups: int, groups_used: int, best: int) -> None:
        """Lowest numbers for all but the `groups_used` groups whose `best` experts together have the most."""
        size, worth = self.count // groups, shared((groups,))
        barrier()  # choice is of other lanes too

        def weigh(group: Any) -> None:
            first, second = local((1,)), local((1,))
            T.buffer_store(first, f32(LOWEST), [0])
            T.buffer_store(second, f32(LOWEST), [0])
            with T.serial(0, size) as e:
                number = self.choice[group * size + e]
                T.buffer_store(second, T.Select(number > first[0], first[0], T.max(second[0], number)), [0])
                T.buffer_store(first, T.max(first[0], number), [0])
            T.buffer_store(worth, first[0] + second[0] if best == 2 and size > 1 else first[0], [group])

        def close(e: Any) -> None:
            own, ahead = worth[T.floordiv(e, size)], local((1,), "int32")
            T.buffer_store(ahead, i32(0), [0])
            with T.serial(0, groups) as other:
                is_first = tirx.all(worth[other] == own, other < T.floordiv(e, size))
                with T.If(tirx.any(worth[other] > own, is_first)), T.Then():
                    T.buffer_store(ahead, ahead[0] + 1, [0])
            with T.If(ahead[0] >= groups_used), T.Then():
                T.buffer_store(self.choice, f32(LOWEST), [e])

        strided(groups, self.lane, WARP, weigh)
        barrier()
        self.each(close)


def _reduced(each: Any, start: Any, number: Any, combine: Any) -> Any:
    """Numbers of all that `each` goes over combined, in a register of every lane."""
    one = local((1,))
    T.buffer_store(one, start, [0])
    each(lambda i: T.buffer_store(one, combine(one[0], number(i)), [0]))
    warp_reduce(one, 0, combine)
    return one[0]


def _softmax(each: Any, x: Any) -> None:
    """x = e^x over their sum, each by the lane that has it."""
    top = _reduced(each, f32(LOWEST), lambda i: x[i], greater)
    each(lambda i: T.buffer_store(x, T.exp(x[i] - top), [i]))
    whole = _reduced(each, f32(0), lambda i: x[i], added)
    each(lambda i: T.buffer_store(x, x[i] / whole, [i]))
