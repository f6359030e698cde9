"""What the variables of a function stand for, and how often they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tvm import relax


def bound_in(function: Any) -> dict[Any, Any]:
    """Variable -> the expression that is bound to it, in the order of the function."""
    return {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}


def reads_of(function: Any) -> Counter[Any]:
    """Variable -> how many expressions of the function read it, each as often as it does."""
    reads = Counter[Any]()

    def visit(expr: Any) -> None:
        operands = _OPERANDS.get(type(expr))  # most are variables: of TVM's classes, isinstance takes a while to say no
        for part in operands(expr) if operands else ():
            reads[part] += 1

    relax.analysis.post_order_visit(function.body, visit)
    return reads


_OPERANDS: dict[type, Callable[[Any], Iterable[Any]]] = {
    relax.Call: lambda call: (part for part in call.args if not isinstance(part, relax.Tuple)),
    relax.TupleGetItem: lambda item: (item.tuple_value,),
    relax.SeqExpr: lambda seq: (seq.body,),
    relax.Tuple: lambda whole: whole.fields,
}
