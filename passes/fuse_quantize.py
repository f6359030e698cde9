"""Norms and activations that only int8 matrices read give int8 at once: their rows never go through memory as floats.

q = quantize_rows(rms_norm(x, w)) -> q = rms_norm_i8(x, w), and likewise for all of compiler/ops/narrowed.py, and for
quantize_rotated.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.formats import GROUP
from llmc.compiler.ops.quantized import ENDINGS
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.narrowings import narrowings


def fuse_quantize(module: tvm.IRModule) -> tvm.IRModule:
    """Every quantization of rows that are read nowhere else, fused with what computes them."""
    return rewrite_functions(_Fuse(module), module)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.fused: dict[Any, str] = {}  # variables whose ops are to give int8, and what such ops' names end in
        self.gone: set[Any] = set()  # variables that nobody reads then
        self.parts: dict[
            Any, tuple[Any, int]
        ] = {}  # what quantization gave -> the fused op, and where that begins in it
        for function in module.functions.values():
            if isinstance(function, relax.Function):
                for store, ending in ENDINGS.items():
                    self._plan(function, store, ending)

    def _plan(self, function: Any, store: str, ending: str) -> None:
        for each in narrowings(function, store, GROUP):
            self.fused[each.source] = ending
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
        fused = ops.call(op.name + self.fused[binding.var], [self.visit_expr(tensor) for tensor in tensors], attrs)
        self.set_var_remap(binding.var, self.builder_.emit(fused, binding.var.name))

    def visit_tuple_getitem_(self, item: Any) -> Any:
        if item.tuple_value not in self.parts:
            return super().visit_tuple_getitem_(item)
        source, first = self.parts[item.tuple_value]
        return relax.TupleGetItem(self.visit_expr(source), first + int(item.index))
