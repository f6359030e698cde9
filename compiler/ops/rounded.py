"""Ops whose result goes straight to bfloat16: what they compute is what round_rows would make of their last result."""

from __future__ import annotations

from llmc.compiler.ops import attending, core
from llmc.compiler.ops.narrowed import MULTIPLIED, NARROWED, linear_then, narrowed

ENDING = "_bf16"
ATTENTION = ("attention", "rope_attention")
ROUNDED = (*NARROWED, *ATTENTION)
LINEAR = "bf16_linear"
_ROWS = narrowed("round_rows", ENDING, ", of an even width", [op for op in attending.ROWS if op.name in ATTENTION])
_LINEAR = next(op for op in core.ROWS if op.name == LINEAR)
ROWS = (*_ROWS, *(linear_then(_LINEAR, op) for op in _ROWS if op.name.removesuffix(ENDING) in MULTIPLIED))
