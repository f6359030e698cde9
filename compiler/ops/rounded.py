"""Ops whose result goes straight to bfloat16: what they compute is what round_rows would make of their last result."""

from __future__ import annotations

from llmc.compiler.ops import attending
from llmc.compiler.ops.narrowed import NARROWED, narrowed

ENDING = "_bf16"
ATTENTION = ("attention", "rope_attention")
ROUNDED = (*NARROWED, *ATTENTION)
ROWS = narrowed("round_rows", ENDING, ", of an even width", [op for op in attending.ROWS if op.name in ATTENTION])
