"""What the variables of a function stand for, and how often they are read."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tvm import relax


def bound_in(function: Any) -> dict[Any, Any]:
    """Variable -> the expression that is bound to it, in the order of the function."""
    return {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}


def reads_of(function: Any) -> Counter[Any]:
    """Variable -> how many expressions of the function read it, each as often as it does."""
    reads = Counter[Any]()
    relax.analysis.post_order_visit(function.body, lambda expr: reads.update(_operands(expr)))
    return reads


def _operands(expr: Any) -> list[Any]:
    if isinstance(expr, relax.Call):
        return [part for part in expr.args if not isinstance(part, relax.Tuple)]
    if isinstance(expr, relax.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relax.SeqExpr):
        return [expr.body]
    return list(expr.fields) if isinstance(expr, relax.Tuple) else []
