"""Ops whose result goes straight to bfloat16: what they compute is what round_rows would make of their last result.

Each is an op of core.py with a name that ends in _bf16, for even widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmc.compiler import meaning
from llmc.compiler.ops import core
from llmc.compiler.ops.op import Attr, Op, Result, Shape

ROUNDED = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "activate", "gated", "bounded_gated")
ENDING = "_bf16"
ROUND = next(op for op in core.ROWS if op.name == "round_rows")


def _op(plain: Op) -> Op:
    return Op(
        plain.name + ENDING,
        plain.operands,
        plain.attrs,
        _result(plain),
        _meaning(plain),
        f"{plain.name}, its last result as round_rows gives it, of an even width",
        f"fusion of {plain.name} and round_rows",
    )


def _result(plain: Op) -> Callable[[list[Shape], dict[str, Attr]], Result]:
    def result(shapes: list[Shape], attrs: dict[str, Attr]) -> Result:
        *others, (last, _) = plain.result(shapes, attrs)
        return [*others, *ROUND.result([last], {})]

    return result


def _meaning(plain: Op) -> Callable[..., Any]:
    def rounded(*arrays: Any, **attrs: Attr) -> Any:
        results = plain.meaning(*arrays, **attrs)
        *others, last = results if isinstance(results, tuple) else (results,)
        return (*others, meaning.round_rows(last)) if others else meaning.round_rows(last)

    return rounded


ROWS = tuple(_op(op) for op in core.ROWS if op.name in ROUNDED)
