"""Norms and activations that only int8 matrices read give int8 at once: their rows never go through memory as floats.

q = quantize_rows(rms_norm(x, w)) -> q = rms_norm_i8(x, w), and likewise for all of compiler/ops/narrowed.py.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.formats import GROUP
from llmc.compiler.ops.quantized import ENDING
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.narrowings import narrowings


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
                for each in narrowings(function, "quantize_rows", GROUP):
                    self.fused.add(each.source)
                    self.gone |= {each.stored, each.rows} - {each.source}
                    self.parts[each.stored] = each.source, each.others

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
