"""Norms and activations that only int8 matrices read give int8 at once: their rows never go through memory as floats.

q = quantize_rows(rms_norm(x, w)) -> q = rms_norm_i8(x, w), and likewise for all of compiler/ops/quantized.py.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.formats import GROUP
from llmc.compiler.ops.quantized import ENDING, QUANTIZED
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.bindings import bound_in, reads_of


def fuse_quantize(module: tvm.IRModule) -> tvm.IRModule:
    """Every quantize_rows of what is read nowhere else, fused with what computes it."""
    return rewrite_functions(_Fuse(module), module)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.fused: set[Any] = set()  # variables whose ops are to give int8
        self.gone: set[Any] = set()  # variables that nobody reads then
        self.parts: dict[
            Any, tuple[Any, int]
        ] = {}  # codes, scales, sums and starts -> the fused op, and where they begin in it
        for function in module.functions.values():
            if isinstance(function, relax.Function):
                self._plan(function)

    def _plan(self, function: Any) -> None:
        bound = bound_in(function)
        reads = reads_of(function)
        for variable, value in bound.items():
            found = ops.match(value)
            if found is None or found[0].name != "quantize_rows":
                continue
            (x,) = found[1]
            source, place = x, 0
            if isinstance(bound.get(x), relax.TupleGetItem):
                source, place = bound[x].tuple_value, int(bound[x].index)
            if _name(bound.get(source)) not in QUANTIZED or reads[x] != 1 or int(x.ty.shape[1]) % GROUP:
                continue
            others = len(source.ty.fields) - 1 if isinstance(source.ty, tvm.ir.TupleType) else 0
            if place != others:
                continue
            self.fused.add(source)
            self.gone |= {variable} if x.same_as(source) else {variable, x}
            self.parts[variable] = source, others

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var in self.gone:
            return
        found = ops.match(binding.value) if binding.var in self.fused else None
        if found is None:
            super().visit_var_binding_(binding)
            return
        op, tensors, attrs = found
        fused = ops.call(op.name + ENDING, [self.visit_expr(tensor) for tensor in tensors], attrs)
        self.set_var_remap(binding.var, self.builder_.emit(fused, binding.var.name))

    def visit_tuple_getitem_(self, item: Any) -> Any:
        if item.tuple_value not in self.parts:
            return super().visit_tuple_getitem_(item)
        source, first = self.parts[item.tuple_value]
        return relax.TupleGetItem(self.visit_expr(source), first + int(item.index))


def _name(value: Any) -> str:
    """Of an op of ours, else nothing."""
    found = None if value is None else ops.match(value)
    return found[0].name if found else ""
