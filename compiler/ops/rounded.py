"""Ops whose result goes straight to bfloat16: what they compute is what round_rows would make of their last result."""

from __future__ import annotations

from llmc.compiler.ops.narrowed import narrowed

ENDING = "_bf16"
ROWS = narrowed("round_rows", ENDING, ", of an even width")
