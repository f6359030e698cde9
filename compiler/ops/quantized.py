"""Ops whose result goes straight to int8: what they compute is what quantize_rows would make of their last result.

Each is an op of core.py with a name that ends in _i8, for widths that are multiples of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmc.compiler import meaning
from llmc.compiler.ops import core
from llmc.compiler.ops.op import Attr, Op, Result, Shape

QUANTIZED = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "activate", "gated", "bounded_gated")
ENDING = "_i8"
MULTIPLIED = ("activate", "gated", "bounded_gated")  # of these, those that are fused with the i8_linear they are of
LINEAR = "i8_linear"


def _result(plain: Op) -> Callable[[list[Shape], dict[str, Attr]], Result]:
    def result(shapes: list[Shape], attrs: dict[str, Attr]) -> Result:
        *others, (last, _) = plain.result(shapes, attrs)
        return [*others, *core.quantized_rows([last], {})]

    return result


def _meaning(plain: Op) -> Callable[..., Any]:
    def quantized(*arrays: Any, **attrs: Attr) -> Any:
        results = plain.meaning(*arrays, **attrs)
        *others, last = results if isinstance(results, tuple) else (results,)
        return (*others, *meaning.quantize_rows(last))

    return quantized


def _op(plain: Op) -> Op:
    return Op(
        plain.name + ENDING,
        plain.operands,
        plain.attrs,
        _result(plain),
        _meaning(plain),
        f"{plain.name}, its last result as quantize_rows gives it: codes, scales, sums, starts; K is a multiple of 64",
        f"fusion of {plain.name} and quantize_rows",
    )


def after_linear(name: str) -> str:
    """The op that is i8_linear and then the op `name` of its result.

    >>> after_linear("gated_i8")
    'i8_linear_gated_i8'
    """
    return f"{LINEAR}_{name}"


def _after_linear(linear: Op, quantized: Op) -> Op:
    def result(shapes: list[Shape], attrs: dict[str, Attr]) -> Result:
        return quantized.result([shape for shape, _ in linear.result(shapes, attrs)], attrs)

    def both(*arrays: Any, format: str, width: int, **attrs: Attr) -> Any:
        return quantized.meaning(linear.meaning(*arrays, format=format, width=width), **attrs)

    return Op(
        after_linear(quantized.name),
        linear.operands,
        (*linear.attrs, *quantized.attrs),
        result,
        both,
        f"{quantized.name} of the result of {linear.name}",
        f"fusion of {linear.name} and {quantized.name}",
    )


_ROWS = tuple(_op(op) for op in core.ROWS if op.name in QUANTIZED)
_LINEAR = next(op for op in core.ROWS if op.name == LINEAR)
ROWS = (*_ROWS, *(_after_linear(_LINEAR, op) for op in _ROWS if op.name.removesuffix(ENDING) in MULTIPLIED))
