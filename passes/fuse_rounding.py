"""Norms and activations that only matrices read give bfloat16 at once, for targets that have kernels for it.

p = round_rows(rms_norm(x, w)) -> p = rms_norm_bf16(x, w), and likewise for all of compiler/ops/rounded.py.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.ops.rounded import ENDING, ROUNDED
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.bindings import bound_in, reads_of


def fuse_rounding(module: tvm.IRModule) -> tvm.IRModule:
    """Every round_rows of what is read nowhere else, fused with what computes it."""
    return rewrite_functions(_Fuse(module), module)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.sources: set[Any] = set()  # variables whose ops are to give bfloat16
        self.gone: set[Any] = set()  # variables that nobody reads then
        self.pairs: dict[Any, tuple[Any, int | None]] = {}  # what rounding gave -> the source, and which of its results
        for function in module.functions.values():
            if isinstance(function, relax.Function):
                self._plan(function)

    def _plan(self, function: Any) -> None:
        bound, reads = bound_in(function), reads_of(function)
        for variable, value in bound.items():
            found = ops.match(value)
            if found is None or found[0].name != "round_rows":
                continue
            (x,) = found[1]
            source, place = x, None
            if isinstance(bound.get(x), relax.TupleGetItem):
                source, place = bound[x].tuple_value, int(bound[x].index)
            made = ops.match(bound.get(source))
            if made is None or made[0].name not in ROUNDED or reads[x] != 1 or int(x.ty.shape[1]) % 2:
                continue
            last = len(source.ty.fields) - 1 if isinstance(source.ty, tvm.ir.TupleType) else None
            if place != last:
                continue
            self.sources.add(source)
            self.pairs[variable] = source, place
            if place is not None:
                self.gone.add(x)

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var in self.gone:
            return
        if binding.var in self.pairs:
            source, place = self.pairs[binding.var]
            made = self.visit_expr(source)
            self.set_var_remap(
                binding.var, made if place is None else self.builder_.emit(relax.TupleGetItem(made, place))
            )
            return
        if binding.var not in self.sources:
            super().visit_var_binding_(binding)
            return
        found = ops.match(binding.value)
        assert found is not None
        op, tensors, attrs = found
        fused = ops.call(op.name + ENDING, [self.visit_expr(tensor) for tensor in tensors], attrs)
        self.set_var_remap(binding.var, self.builder_.emit(fused, binding.var.name))
