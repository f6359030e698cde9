"""Ops whose result goes straight to int8: what quantize_rows or quantize_rotated would make of their last result.

Those of narrowed.py, with names that end in _i8 or _rotated_i8, for widths that are multiples of 64; and these behind
matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc.compiler.meaning.experts import experts_bias
from llmc.compiler.ops import core, experts
from llmc.compiler.ops.narrowed import MULTIPLIED, linear_then, narrowed
from llmc.compiler.ops.op import Attr, Op, Result, Shape

ENDINGS = {"quantize_rows": "_i8", "quantize_rotated": "_rotated_i8"}  # by what stores their last result
GATED = ("gated", "bounded_gated")  # those that are fused with the two i8_experts_in they are of
LINEAR = "i8_linear"
EXPERTS, BIAS = "i8_experts_in", "experts_bias"


def after_experts(name: str, biased: bool = False) -> str:
    """The op that is two i8_experts_in of the same rows, side by side, and then the op `name` of both.

    `biased`: each plus its experts_bias.

    >>> after_experts("gated_i8"), after_experts("gated_i8", biased=True)
    ('i8_experts_gated_i8', 'i8_experts_biased_gated_i8')
    """
    return f"i8_experts_{'biased_' * biased}{name}"


def _after_experts(matrix: Op, quantized: Op, biased: bool) -> Op:
    left, biases = matrix.operands[:-1], ("gate_bias", "up_bias") * biased
    each = f"{matrix.name} plus experts_bias" if biased else matrix.name

    def result(shapes: list[Shape], attrs: dict[str, Attr]) -> Result:
        ((rows, columns), _), *_ = matrix.result(shapes[: len(matrix.operands)], attrs)
        return quantized.result([(rows, 2 * columns)], attrs)

    def all_of_it(*arrays: Any, format: str, experts: int, width: int, **attrs: Attr) -> Any:
        operands, weights, added = arrays[: len(left)], arrays[len(left) : len(left) + 2], arrays[len(left) + 2 :]
        both = [matrix.meaning(*operands, w, format=format, experts=experts, width=width) for w in weights]
        if added:
            both = [experts_bias(y, operands[-1], bias, experts) for y, bias in zip(both, added, strict=True)]
        return quantized.meaning(np.concatenate(both, axis=1), **attrs)

    return Op(
        after_experts(quantized.name, biased),
        (*left, "gate", "up", *biases),
        (*matrix.attrs, *quantized.attrs),
        result,
        all_of_it,
        f"{quantized.name} of {each} with gate and with up, side by side; width is a multiple of 64",
        f"fusion of {matrix.name} and {quantized.name}",
    )


_RESULTS = {
    "quantize_rows": ": codes, scales, sums, starts; K is a multiple of 64",
    "quantize_rotated": ": codes, scales, starts; K is a multiple of 64",
}
_ROWS = [(store, op) for store, ending in ENDINGS.items() for op in narrowed(store, ending, _RESULTS[store])]
_LINEAR = next(op for op in core.ROWS if op.name == LINEAR)
_EXPERTS = next(op for op in experts.ROWS if op.name == EXPERTS)


def _of(names: tuple[str, ...]) -> list[Op]:
    """The ops with these names and an ending."""
    return [op for store, op in _ROWS if op.name.removesuffix(ENDINGS[store]) in names]


ROWS = (
    *(op for _, op in _ROWS),
    *(linear_then(_LINEAR, op) for op in _of(MULTIPLIED)),
    *(_after_experts(_EXPERTS, op, biased) for op in _of(GATED) for biased in (False, True)),
)
