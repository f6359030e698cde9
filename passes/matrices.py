"""Which matrices a step multiplies with: the unit of every choice of a format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.passes.bindings import bound_in

# Ops whose last operand is a matrix that has a format.
MULTIPLYING = ("linear", "embedding", "head_linear", "experts_in", "experts_out")


@dataclass(frozen=True)
class Matrix:
    """One matrix of the graph. `sources` are the weights it stands for, one under another.

    Matrices of all experts of a layer count as one, without an input: no expert sees all rows, so that nothing can be
    said of what the whole is multiplied with, and calibration leaves it to rounding.
    """

    sources: tuple[str, ...]
    rows: int
    columns: int
    input: Any  # the variable it is multiplied with; None for experts, and for a table that is only looked up in


def sources(lookup: Callable[[Any], Any], weight: Any) -> tuple[str, ...]:
    """Names of the weights that a linear layer's weight is made of: itself, or the parts of a concatenation."""
    value = lookup(weight)
    if isinstance(value, relax.Call) and value.op.name == "relax.concat":
        return tuple(name for part in value.args[0].fields for name in sources(lookup, part))
    return (str(weight.name),)


def matrices(module: tvm.IRModule, function: str = "step") -> list[Matrix]:
    """The matrices of an unpacked function, each once, in the order of the graph."""
    bound = bound_in(module[function])
    found: dict[tuple[str, ...], Matrix] = {}
    for value in bound.values():
        match = ops.match(value)
        if match is None or match[0].name not in MULTIPLYING:
            continue
        op, (left, *_, weight), _ = match
        names = sources(bound.get, weight)
        rows, columns = (int(size) for size in weight.ty.shape)
        if op.name == "linear" or names not in found:
            found[names] = Matrix(names, rows, columns, left if op.name == "linear" else None)
    return list(found.values())
