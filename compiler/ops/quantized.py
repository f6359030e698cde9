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


ROWS = tuple(_op(op) for op in core.ROWS if op.name in QUANTIZED)
