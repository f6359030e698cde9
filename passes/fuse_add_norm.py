"""A residual sum and the norm of it become one op: the sum is read from cache once instead of from memory twice.

x = add(a, b); y = rms_norm(x, w) -> (x, y) = add_rms_norm(a, b, w), and layer_norm likewise.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, relax

from llmc.compiler import ops
from llmc.compiler.rewrite import rewrite_functions

_FUSED = {"rms_norm": "add_rms_norm", "layer_norm": "add_layer_norm"}


def fuse_add_norm(module: tvm.IRModule) -> tvm.IRModule:
    """Every norm of a sum of two matrices, fused with it."""
    fused = rewrite_functions(_Fuse(module), module)
    return relax.transform.DeadCodeElimination()(fused)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.sums: dict[Any, Any] = {}  # variable of a fused sum -> what later users read instead

    def visit_dataflow_var_(self, variable: Any) -> Any:
        seen = super().visit_dataflow_var_(variable)
        return self.sums.get(seen, seen)

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        found = ops.match(call)
        if found is None or found[0].name not in _FUSED:
            return call
        op, (x, *weights), attrs = found
        total = self.lookup_binding(x)
        if not (isinstance(total, relax.Call) and total.op.same_as(ir.Op.get("relax.add"))):
            return call
        left, right = total.args
        if right.ty.ndim != 2:
            return call
        both = self.builder_.emit(ops.call(_FUSED[op.name], [left, right, *weights], attrs))
        self.sums[x] = self.builder_.emit(relax.TupleGetItem(both, 0))
        return relax.TupleGetItem(both, 1)
