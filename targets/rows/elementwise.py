"""Kernels where every number of the result is made of the numbers in its place: sums, bounds, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.targets.rows.rounding import ROUNDINGS, Rounding, whole_groups
from llmc.targets.rows.rows import columns, kernel, splat_store
from llmc.targets.target import Target
from llmc.targets.vector import LANES, exp, f32, fma, lanes, normal_tail, registers, splat, tanh

Sixteen = Callable[[Any], Any]  # float32x16 -> float32x16
Pair = Callable[[Any, Any], Any]  # two of them -> one


def _map(shapes: list[Any], function: Sixteen) -> tirx.PrimFunc:
    """x (M, C) -> function(x) (M, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        one = registers((LANES,), "float32")

        def scalar(c: Any) -> None:
            splat_store(one, function(splat(x[row, c])))
            T.buffer_store(out, one[0], [row, c])

        columns(width, lambda c: T.buffer_store(out, function(x[row, lanes(c)]), [row, lanes(c)]), scalar)

    return kernel(["float32"] * 2, shapes, body)


def scale(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> x * factor (M, C)."""
    return _map(shapes, lambda x: x * splat(f32(attrs["factor"])))


def clip(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> x within -bound..bound (M, C)."""
    low, high = splat(f32(-attrs["bound"])), splat(f32(attrs["bound"]))
    return _map(shapes, lambda x: T.Select(x > high, high, T.Select(x < low, low, x)))  # NaN stays, as in _relu


def capped(x: Any, cap: float) -> Any:
    """cap * tanh(x / cap) in float32x16."""
    return tanh(x / splat(f32(cap))) * splat(f32(cap))


def soft_cap(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> cap * tanh(x / cap) (M, C)."""
    return _map(shapes, lambda x: capped(x, float(attrs["cap"])))


def add_row(x: Any, y: Any, out: Any, row: Any, width: int) -> None:
    """out[row] = x[row] + y[row]."""
    columns(
        width,
        lambda c: T.buffer_store(out, x[row, lanes(c)] + y[row, lanes(c)], [row, lanes(c)]),
        lambda c: T.buffer_store(out, x[row, c] + y[row, c], [row, c]),
    )


def add(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x, y (M, C) or y (C,) -> (M, C): a residual, or a bias."""
    width = int(shapes[0][1])
    bias = len(shapes[1]) == 1

    def body(buffers: list[Any], row: Any) -> None:
        x, y, out = buffers
        if not bias:
            return add_row(x, y, out, row, width)
        return columns(
            width,
            lambda c: T.buffer_store(out, x[row, lanes(c)] + y[lanes(c)], [row, lanes(c)]),
            lambda c: T.buffer_store(out, x[row, c] + y[c], [row, c]),
        )

    return kernel(["float32"] * 3, shapes, body)


def _swish(x: Any, beta: float) -> Any:
    """x * sigmoid(beta x)."""
    return x / (splat(f32(1)) + exp(T.min(x * splat(f32(-beta)), splat(f32(88)))))


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x) in float32x16."""
    return splat(f32(1)) / (splat(f32(1)) + exp(T.min(x * splat(f32(-1)), splat(f32(88)))))


def _sigmoid(x: Any) -> Any:
    """`sigmoid`; of NaN, which that takes for a number, NaN."""
    found = sigmoid(x)
    return T.Select(x > splat(f32(0)), found, T.Select(x <= splat(f32(0)), found, x))


def _gelu(x: Any) -> Any:
    """x times the share of the normal distribution below x."""
    tail = normal_tail(T.max(x, splat(f32(0)) - x))
    return x * T.Select(x < splat(f32(0)), tail, splat(f32(1)) - tail)


def _gelu_tanh(x: Any) -> Any:
    """x / 2 * (1 + tanh(y)) = x / (1 + e^-2y), y = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    cubic = fma(x * x * x, splat(f32(0.044715)), x)
    exponent = cubic * splat(f32(-2 * math.sqrt(2 / math.pi)))
    return x / (splat(f32(1)) + exp(T.min(exponent, splat(f32(88)))))


def _relu(x: Any) -> Any:
    """The greater of x and 0; of NaN, where T.max gives 0, NaN."""
    return T.Select(x < splat(f32(0)), splat(f32(0)), x)


_FUNCTIONS: dict[str, Sixteen] = {
    "silu": lambda x: _swish(x, 1),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_sigmoid": lambda x: _swish(x, 1.702),
    "sigmoid": _sigmoid,
    "relu": _relu,
    "relu_squared": lambda x: _relu(x) * _relu(x),
}


def _activation(attrs: dict[str, Any]) -> Sixteen:
    if attrs["activation"] not in _FUNCTIONS:
        raise LlmcError(f"no kernel for activation {attrs['activation']!r}; llmc knows: {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[attrs["activation"]]


def activate(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, F) -> activation(x) (M, F)."""
    return _map(shapes, _activation(attrs))


def gated(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """gate_up (M, 2F) -> activation(gate) * up (M, F)."""
    return _halves(shapes, _gate(attrs))


def bounded_gated(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """gate_up (M, 2F) -> activation(gate) * (up + plus) (M, F), gate up to the limit, up within it."""
    return _halves(shapes, _bounded_gate(attrs))


def _gate(attrs: dict[str, Any]) -> Pair:
    activation = _activation(attrs)
    return lambda gate, up: activation(gate) * up


def _bounded_gate(attrs: dict[str, Any]) -> Pair:
    activation, plus = _activation(attrs), splat(f32(attrs["plus"]))
    high, low = splat(f32(attrs["limit"])), splat(f32(-attrs["limit"]))

    def bounded(x: Any) -> Any:
        return T.Select(x > high, high, x)  # NaN stays, as in _relu

    return lambda gate, up: activation(bounded(gate)) * (T.Select(up < low, low, bounded(up)) + plus)


def _halves(shapes: list[Any], function: Pair) -> tirx.PrimFunc:
    """x (M, 2F) -> function(first half, second half) (M, F)."""
    width = int(shapes[1][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        one = registers((LANES,), "float32")

        def scalar(c: Any) -> None:
            splat_store(one, function(splat(x[row, c]), splat(x[row, width + c])))
            T.buffer_store(out, one[0], [row, c])

        columns(
            width,
            lambda c: T.buffer_store(out, function(x[row, lanes(c)], x[row, lanes(width + c)]), [row, lanes(c)]),
            scalar,
        )

    return kernel(["float32"] * 2, shapes, body)


@dataclass(frozen=True)
class Activation:
    """How a row of `parts` F columns becomes one of F: `of(attrs)` of what stands in the same place of each part."""

    parts: int
    of: Callable[[dict[str, Any]], Callable[..., Any]]

    def i8(self, rounding: Rounding, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
        """x (M, parts F) -> (M, F) as int8."""
        function, width = self.of(attrs), whole_groups(shapes[0]) // self.parts

        def body(buffers: list[Any], row: Any) -> None:
            x, *quantized = buffers
            parts = range(0, self.parts * width, width)
            rounding.row(lambda c: function(*(x[row, lanes(part + c)] for part in parts)), row, width, quantized)

        return kernel(["float32", *rounding.dtypes], shapes, body)


# By the op whose result they are, of those that are fused with what quantizes it.
ACTIVATIONS = {
    "activate": Activation(1, _activation),
    "gated": Activation(2, _gate),
    "bounded_gated": Activation(2, _bounded_gate),
}
QUANTIZED_ACTIVATIONS = {
    name + ending: partial(activation.i8, rounding)
    for name, activation in ACTIVATIONS.items()
    for ending, rounding in ROUNDINGS.items()
}


def xielu(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, F), above, below (1,) -> x / 2 + above x^2, or x / 2 + (below + 1/2) (e^x - 1 - x) (M, F)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, above, below, out = buffers
        one = registers((LANES,), "float32")

        def bent(value: Any) -> Any:
            part = exp(T.min(value, splat(f32(-1e-6)))) - splat(f32(1)) - value
            curve = T.Select(value > splat(f32(0)), splat(above[0]) * value * value, splat(below[0] + f32(0.5)) * part)
            return fma(value, splat(f32(0.5)), curve)

        def scalar(c: Any) -> None:
            splat_store(one, bent(splat(x[row, c])))
            T.buffer_store(out, one[0], [row, c])

        columns(width, lambda c: T.buffer_store(out, bent(x[row, lanes(c)]), [row, lanes(c)]), scalar)

    return kernel(["float32"] * 4, shapes, body)
