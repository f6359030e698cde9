"""Kernels that decide which experts a row goes through, and how much of a shared expert it takes.

A row's numbers are worked on in a small array of their own, padded to whole registers.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import ceil_to
from llmc.targets.rows.elementwise import sigmoid
from llmc.targets.rows.rows import columns, kernel
from llmc.targets.target import Target
from llmc.targets.vector import LANES, exp, f32, held, i32, lanes, registers, splat

LOWEST = float("-inf")


def gate_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), gate (M, N) -> x * sigmoid(gate) (M, C), each of N slices of a row by its own."""
    count = int(shapes[1][1])
    width = int(shapes[0][1]) // count

    def body(buffers: list[Any], row: Any) -> None:
        x, gate, out = buffers
        share = registers((LANES,), "float32")

        with T.serial(0, count) as n:
            T.buffer_store(share, sigmoid(splat(gate[row, n])), [lanes(0)])
            first = n * width
            columns(
                width,
                lambda c: T.buffer_store(out, x[row, lanes(first + c)] * share[lanes(0)], [row, lanes(first + c)]),
                lambda c: T.buffer_store(out, x[row, first + c] * share[0], [row, first + c]),
            )

    return kernel(["float32"] * 3, shapes, body)


def route(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """logits (M, E), bias (E,) -> ids (M, U), weights (M, U). Ids are those of experts whatever the logits are."""
    count, used, routing = int(shapes[0][1]), int(attrs["used"]), attrs["routing"]

    if routing == "sparse_mixer":
        return _sparse_mixer(shapes, count, used, float(attrs["tolerance"]))

    def body(buffers: list[Any], row: Any) -> None:
        logits, bias, ids, weights = buffers
        scores, choice, chosen = (_array(size) for size in (count, count, used))
        with T.serial(0, count) as e:
            T.buffer_store(scores, logits[row, e], [e])
        if routing == "softmax":
            _softmax(scores, count)
        elif routing == "sigmoid":
            _map(scores, count, sigmoid)
        with T.serial(0, count) as e:
            T.buffer_store(choice, scores[e] + bias[e], [e])
        if attrs["groups"] > 1:
            best = 2 if routing == "sigmoid" else 1
            _close_groups(choice, count, int(attrs["groups"]), int(attrs["groups_used"]), best)
        _choose(choice, scores, chosen, ids, row, count, used)
        if routing == "sigmoid_of_chosen":
            _map(chosen, used, sigmoid)
        if routing == "softmax_of_chosen":
            _softmax(chosen, used)
        elif attrs["renormalize"]:
            _divide(chosen, used, _sum(chosen, used) + f32(1e-20))
        with T.serial(0, used) as u:
            T.buffer_store(weights, chosen[u] * f32(attrs["scale"]), [row, u])

    return kernel(["float32", "float32", "int32", "float32"], shapes, body)


def _choose(choice: Any, scores: Any, chosen: Any, ids: Any, row: Any, count: int, used: int) -> None:
    """ids[row] are the `used` best, ascending, and `chosen` their scores; the first ones where there is no number."""
    taken, place = registers((count,), "int32"), registers((1,), "int32")
    with T.serial(0, count) as e:
        T.buffer_store(taken, i32(0), [e])
    with T.serial(0, used) as u:
        T.buffer_store(ids, u, [row, u])
        T.buffer_store(chosen, scores[u], [u])
        best = _best(choice, 0, count)
        T.buffer_store(taken, i32(1), [best])
        T.buffer_store(choice, f32(LOWEST), [best])
    T.buffer_store(place, i32(0), [0])
    with T.serial(0, count) as e, T.If(taken[e] == 1), T.Then():
        T.buffer_store(ids, e, [row, place[0]])
        T.buffer_store(chosen, scores[e], [place[0]])
        T.buffer_store(place, place[0] + 1, [0])


def _array(size: int) -> Any:
    """Zeros, padded to whole registers."""
    out = registers((ceil_to(size, LANES),), "float32")
    with T.serial(0, ceil_to(size, LANES) // LANES) as step:
        T.buffer_store(out, splat(f32(0)), [lanes(step * LANES)])
    return out


def _map(x: Any, count: int, function: Any) -> None:
    """x = function(x), padding too."""
    with T.serial(0, ceil_to(count, LANES) // LANES) as step:
        T.buffer_store(x, function(x[lanes(step * LANES)]), [lanes(step * LANES)])


def _sum(x: Any, count: int) -> Any:
    total = registers((1,), "float32")
    T.buffer_store(total, f32(0), [0])
    with T.serial(0, count) as e:
        T.buffer_store(total, total[0] + x[e], [0])
    return total[0]


def _divide(x: Any, count: int, by: Any) -> None:
    whole = held(splat(by))
    _map(x, count, lambda part: part / whole)


def _softmax(x: Any, count: int) -> None:
    top = registers((1,), "float32")
    T.buffer_store(top, f32(LOWEST), [0])
    with T.serial(0, count) as e:
        T.buffer_store(top, T.max(top[0], x[e]), [0])
    _map(x, count, lambda part: exp(T.min(part - splat(top[0]), splat(f32(0)))))  # padding may be above the top
    _divide(x, count, _sum(x, count))


def _best(x: Any, first: Any, count: int) -> Any:
    """The place of the greatest of x[first : first + count], the lowest of equals; `first` when there is no number."""
    best, place = registers((1,), "float32"), registers((1,), "int32")
    T.buffer_store(best, f32(LOWEST), [0])
    T.buffer_store(place, first if not isinstance(first, int) else i32(first), [0])
    with T.serial(0, count) as e, T.If(x[first + e] > best[0]), T.Then():
        T.buffer_store(best, x[first + e], [0])
        T.buffer_store(place, first + e, [0])
    return place[0]


def _close_groups(choice: Any, count: int, groups: int, groups_used: int, best: int) -> None:
    """Lowest numbers for all but the `groups_used` groups whose `best` experts together have the most."""
    size = count // groups
    worth = _array(groups)
    is_open = registers((groups,), "int32")
    kept = registers((1,), "float32")
    with T.serial(0, groups) as group:
        T.buffer_store(is_open, i32(0), [group])
        top = _best(choice, group * size, size)
        T.buffer_store(worth, choice[top], [group])
        if best == 2 and size > 1:
            T.buffer_store(kept, choice[top], [0])
            first = registers((1,), "int32")
            T.buffer_store(first, top, [0])
            T.buffer_store(choice, f32(LOWEST), [first[0]])
            T.buffer_store(worth, kept[0] + choice[_best(choice, group * size, size)], [group])
            T.buffer_store(choice, kept[0], [first[0]])
    with T.serial(0, groups_used):
        place = _best(worth, 0, groups)
        T.buffer_store(is_open, i32(1), [place])
        T.buffer_store(worth, f32(LOWEST), [place])
    with T.serial(0, count) as e, T.If(is_open[T.floordiv(e, size)] == 0), T.Then():
        T.buffer_store(choice, f32(LOWEST), [e])


def _sparse_mixer(shapes: list[Any], count: int, used: int, tolerance: float) -> tirx.PrimFunc:
    """logits (M, E), bias (E,), which means nothing -> ids (M, U), weights (M, U)."""

    def body(buffers: list[Any], row: Any) -> None:
        logits, _, ids, weights = buffers
        left, near, shares = _array(count), _array(count), _array(count)
        taken, place = registers((count,), "int32"), registers((1,), "int32")
        top = registers((1,), "float32")
        with T.serial(0, count) as e:
            T.buffer_store(left, logits[row, e], [e])
            T.buffer_store(taken, i32(0), [e])
        with T.serial(0, used) as u:
            T.buffer_store(ids, u, [row, u])
            T.buffer_store(weights, f32(0), [row, u])
            T.buffer_store(place, _best(left, 0, count), [0])
            T.buffer_store(top, left[place[0]], [0])
            with T.serial(0, count) as e:
                size = T.max(T.max(logits[row, e], f32(0) - logits[row, e]), top[0])
                is_near = (top[0] - left[e]) / size <= f32(2 * tolerance)
                T.buffer_store(near, T.Select(is_near, left[e], f32(LOWEST)), [e])
            _softmax(near, count)
            T.buffer_store(shares, near[place[0]], [place[0]])
            T.buffer_store(taken, i32(1), [place[0]])
            T.buffer_store(left, f32(LOWEST), [place[0]])
        T.buffer_store(place, i32(0), [0])
        with T.serial(0, count) as e, T.If(taken[e] == 1), T.Then():
            T.buffer_store(ids, e, [row, place[0]])
            T.buffer_store(weights, shares[e], [row, place[0]])
            T.buffer_store(place, place[0] + 1, [0])

    return kernel(["float32", "float32", "int32", "float32"], shapes, body)
