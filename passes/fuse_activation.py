"""An activation that gives int8 joins the matrix whose result it alone reads: that result stays in the caches.

y = i8_linear(x, w); q = gated_i8(y) -> q = i8_linear_gated_i8(x, w), and likewise for all of MULTIPLIED
(compiler/ops/quantized.py).
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.ops.quantized import ENDING, LINEAR, MULTIPLIED, after_linear
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.bindings import bound_in, reads_of

_ACTIVATIONS = {name + ENDING for name in MULTIPLIED}


def fuse_activation(module: tvm.IRModule) -> tvm.IRModule:
    """Every such pair as one op. A matrix whose result somebody else reads too is left as it was."""
    return rewrite_functions(_Fuse(module), module)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.linears: dict[Any, Any] = {}  # result that an activation alone reads -> its call, as the module has it
        for function in module.functions.values():
            if isinstance(function, relax.Function):
                self._plan(function)

    def _plan(self, function: Any) -> None:
        bound = bound_in(function)
        reads = reads_of(function)
        for value in bound.values():
            found = ops.match(value)
            if found is None or found[0].name not in _ACTIVATIONS:
                continue
            (x,) = found[1]
            linear = ops.match(bound[x]) if x in bound else None
            if linear is not None and linear[0].name == LINEAR and reads[x] == 1:
                self.linears[x] = bound[x]

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var not in self.linears:
            super().visit_var_binding_(binding)

    def visit_call_(self, call: Any) -> Any:
        found = ops.match(call)
        if found is None or found[0].name not in _ACTIVATIONS or found[1][0] not in self.linears:
            return super().visit_call_(call)
        op, (x,), attrs = found
        linear = ops.match(self.linears[x])
        assert linear is not None
        _, operands, own = linear
        return ops.call(after_linear(op.name), [self.visit_expr(operand) for operand in operands], own | attrs)
