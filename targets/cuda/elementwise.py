"""CUDA kernels where every number of the result is made of the numbers in its place: a thread has one, or a few."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import added, bf16_pair, f32, i32, lanes, launch, local, side_by_side, stored
from llmc.targets.cuda.target import CudaTarget

THREADS = 256

Number = Callable[[Any], Any]  # a float32 -> another


def _swish(beta: float) -> Number:
    return lambda x: x / (f32(1) + T.exp(f32(-beta) * x))


def _gelu_tanh(x: Any) -> Any:
    inner = f32(math.sqrt(2 / math.pi)) * (x + f32(0.044715) * x * x * x)
    return x * f32(0.5) * (f32(1) + T.tanh(inner))


def _relu(x: Any) -> Any:
    return T.Select(x < f32(0), f32(0), x)  # NaN stays


ACTIVATIONS: dict[str, Number] = {
    "silu": _swish(1),
    "gelu": lambda x: x * (f32(1) + T.erf(x * f32(math.sqrt(0.5)))) * f32(0.5),
    "gelu_tanh": _gelu_tanh,
    "gelu_sigmoid": _swish(1.702),
    "relu": _relu,
    "relu_squared": lambda x: _relu(x) * _relu(x),
    "sigmoid": lambda x: f32(1) / (f32(1) + T.exp(-x)),
}


def capped(x: Any, cap: float) -> Any:
    """cap * tanh(x / cap)."""
    return T.tanh(x / f32(cap)) * f32(cap)


def column_kernel(
    dtypes: list[str], shapes: list[Any], body: Callable[[list[Any], Any, Any], None], width: int | None = None
) -> tirx.PrimFunc:
    """A PrimFunc that runs `body(buffers, row, column)` in a thread of its own for each number of the last buffer.

    `width`: for each of so many columns instead.
    """
    with IRBuilder() as builder, T.prim_func():
        buffers = arguments(dtypes, shapes)
        _launch_columns(shapes[-1][0], width or int(shapes[-1][1]), lambda *place: body(buffers, *place))
    return builder.get()


def _launch_columns(rows: Any, columns: int, body: Callable[[Any, Any], None]) -> None:
    """A launch of `body(row, column)` in a thread of its own for each."""
    grid = {"blockIdx.x": rows, "blockIdx.y": -(-columns // THREADS), "threadIdx.x": THREADS}
    with launch(grid) as (row, block, thread):
        column = block * THREADS + thread
        if columns % THREADS:
            with T.If(column < columns), T.Then():
                body(row, column)
        else:
            body(row, column)


def _bounded(x: Any, low: Any, high: Any) -> Any:
    """x within low..high; NaN stays."""
    return T.Select(x > high, high, T.Select(x < low, low, x))


Four = Callable[[list[Any], Any, Any], list[Any]]  # buffers, row, places of neighbours -> operands there


def _places_kernel(
    dtypes: list[str], shapes: list[Any], operands: Four, function: Callable[..., Any], aligned: list[int]
) -> tirx.PrimFunc:
    """A PrimFunc of `_launch_places`."""
    with IRBuilder() as builder, T.prim_func():
        _launch_places(arguments(dtypes, shapes), operands, function, aligned)
    return builder.get()


def _launch_places(buffers: list[Any], operands: Four, function: Callable[..., Any], aligned: list[int]) -> None:
    """A launch of out (M, C) = function(operands in its place); out of int32: as bfloat16 pairs (M, C/2).

    `aligned`: what else has to be a multiple of how many neighbours a thread has, for it reads them together.
    """
    out = buffers[-1]
    rounded = out.dtype == "int32"
    width = int(out.shape[1]) * (1 + rounded)
    each = side_by_side(math.gcd(width, *aligned))
    count = each // (1 + rounded)

    def body(row: Any, group: Any) -> None:
        found = []
        for operand in operands(buffers, row, lanes(group * each, each)):
            found.append(local((each,)))
            T.buffer_store(found[-1], operand, [lanes(0, each)])
        for i in range(each):
            T.buffer_store(found[0], function(*(one[i] for one in found)), [i])
        if rounded:
            pairs = local((count,), "int32")
            for i in range(count):
                T.buffer_store(pairs, bf16_pair(found[0][2 * i], found[0][2 * i + 1]), [i])
        value = (pairs if rounded else found[0])[lanes(0, count)]
        T.buffer_store(out, value, [row, stored(group * count, count)])

    _launch_columns(out.shape[0], width // each, body)


def _map(shapes: list[Any], function: Number, rounded: bool = False) -> tirx.PrimFunc:
    """x (M, C) -> function(x) (M, C); `rounded`: as bfloat16 pairs (M, C/2)."""
    dtypes = ["float32", "int32" if rounded else "float32"]
    return _places_kernel(dtypes, shapes, lambda buffers, row, places: [buffers[0][row, places]], function, [])


def scale(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> x * factor (M, C)."""
    return _map(shapes, lambda x: x * f32(attrs["factor"]))


def clip(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> x within -bound..bound (M, C)."""
    low, high = f32(-attrs["bound"]), f32(attrs["bound"])
    return _map(shapes, lambda x: _bounded(x, low, high))


def soft_cap(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> cap * tanh(x / cap) (M, C)."""
    return _map(shapes, lambda x: capped(x, float(attrs["cap"])))


@dataclass(frozen=True)
class Activation:
    """What becomes of a number of x, or of two: those in one place of x's `halves`. `of` gives the function."""

    halves: int
    of: Callable[[dict[str, Any]], Callable[..., Any]]  # attributes -> it

    def launch(self, x: Any, out: Any, attrs: dict[str, Any]) -> None:
        """x (M, halves * F) -> (M, F); out of int32: as bfloat16 pairs (M, F/2)."""
        width = int(x.shape[1]) // self.halves

        def operands(buffers: list[Any], row: Any, places: Any) -> list[Any]:
            return [x[row, places + half * width] for half in range(self.halves)]

        _launch_places([x, out], operands, self.of(attrs), [])


def _gate(attrs: dict[str, Any]) -> Callable[..., Any]:
    """activation(gate) * up."""
    activation = ACTIVATIONS[attrs["activation"]]
    return lambda gate, up: activation(gate) * up


def _bounded_gate(attrs: dict[str, Any]) -> Callable[..., Any]:
    """activation(gate) * (up + plus), gate up to the limit, up within it."""
    activation, plus = ACTIVATIONS[attrs["activation"]], f32(attrs["plus"])
    low, high = f32(-attrs["limit"]), f32(attrs["limit"])

    def both(gate: Any, up: Any) -> Any:
        return activation(T.Select(gate > high, high, gate)) * (_bounded(up, low, high) + plus)

    return both


ACTIVATED = {
    "activate": Activation(1, lambda attrs: ACTIVATIONS[attrs["activation"]]),
    "gated": Activation(2, _gate),
    "bounded_gated": Activation(2, _bounded_gate),
}


def activated(
    name: str, target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], rounded: bool = False
) -> tirx.PrimFunc:  # fmt: skip
    """The kernel of an op of ACTIVATED: x (M, halves * F) -> (M, F); `rounded`: as bfloat16 pairs (M, F/2)."""
    with IRBuilder() as builder, T.prim_func():
        x, out = arguments(["float32", "int32" if rounded else "float32"], shapes)
        ACTIVATED[name].launch(x, out, attrs)
    return builder.get()


def xielu(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, F), above, below (1,) -> x / 2 + above x^2, or x / 2 + (below + 1/2) (e^x - 1 - x) (M, F)."""

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        x, above, below, out = buffers
        value = x[row, column]
        bent = (below[0] + f32(0.5)) * (T.exp(T.min(value, f32(-1e-6))) - f32(1) - value)
        curve = T.Select(value > f32(0), above[0] * value * value, bent)
        T.buffer_store(out, value * f32(0.5) + curve, [row, column])

    return column_kernel(["float32"] * 4, shapes, body)


def add(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) + y (M, C), or y (C,) for all rows."""
    whole = len(shapes[1]) == 2

    def both(buffers: list[Any], row: Any, places: Any) -> list[Any]:
        x, y, _ = buffers
        return [x[row, places], y[row, places] if whole else y[places]]

    return _places_kernel(["float32"] * 3, shapes, both, added, [])


def concat(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """(M, A), (M, B), ... -> (M, A + B + ...): columns side by side."""

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        *parts, out = buffers
        first = 0
        for part, shape in zip(parts, shapes, strict=False):
            after = first + int(shape[1])
            with T.If(tirx.all(column >= first, column < after)), T.Then():
                T.buffer_store(out, part[row, column - first], [row, column])
            first = after

    return column_kernel(["float32"] * len(shapes), shapes, body)


def take_rows(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), rows (R,) -> (R, C)."""

    def picked(buffers: list[Any], row: Any, places: Any) -> list[Any]:
        x, rows, _ = buffers
        return [x[rows[row], places]]

    return _places_kernel(["float32", "int32", "float32"], shapes, picked, _same, [])


def _same(x: Any) -> Any:
    return x


def take_columns(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> (M, count): columns from `first` on."""
    first = int(attrs["first"])

    def picked(buffers: list[Any], row: Any, places: Any) -> list[Any]:
        return [buffers[0][row, places + first]]

    return _places_kernel(["float32"] * 2, shapes, picked, _same, [first, int(shapes[0][1])])


def own_ids(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """ids (M,) or (M, U) -> those less `first`, -1 where that is not within 0..count - 1."""
    first, count = int(attrs["first"]), int(attrs["count"])

    def body(buffers: list[Any], row: Any, column: Any) -> None:
        ids, out = buffers
        place = [row, column][: len(shapes[0])]
        own = ids[tuple(place)] - first
        T.buffer_store(out, T.Select(tirx.all(own >= 0, own < count), own, i32(-1)), place)

    return column_kernel(["int32"] * 2, shapes, body, width=1 if len(shapes[0]) == 1 else None)


def add_parts(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """parts (N, M) -> their sum (M,), added in their order, from any number of them."""
    parts_count, count = shapes[0]
    with IRBuilder() as builder, T.prim_func():
        parts, total = arguments(["float32"] * 2, shapes)
        blocks = T.floordiv(count + (THREADS - 1), THREADS)
        with launch({"blockIdx.x": blocks, "threadIdx.x": THREADS}) as (block, thread):
            place = block * THREADS + thread
            with T.If(place < count), T.Then():
                found = local((1,))
                T.buffer_store(found, parts[0, place], [0])
                with T.serial(1, parts_count) as part:
                    T.buffer_store(found, found[0] + parts[part, place], [0])
                T.buffer_store(total, found[0], [place])
    return builder.get()


def round_rows(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) -> bfloat16 pairs (M, ceil(K / 2)) int32, the even column low."""
    width = int(shapes[0][1])
    if width % 2 == 0:
        return _map(shapes, _same, rounded=True)

    def body(buffers: list[Any], row: Any, pair: Any) -> None:
        x, out = buffers
        first, second = 2 * pair, 2 * pair + 1
        other = T.if_then_else(second < width, x[row, second], f32(0))
        T.buffer_store(out, bf16_pair(x[row, first], other), [row, pair])

    return column_kernel(["float32", "int32"], shapes, body)
