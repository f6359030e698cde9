"""Norms, activations and attention that only matrices read give bfloat16 at once, for targets with kernels for it.

p = round_rows(rms_norm(x, w)) -> p = rms_norm_bf16(x, w), and likewise for all of compiler/ops/rounded.py.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.ops.rounded import ENDING, ROUNDED
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.narrowings import narrowings


def fuse_rounding(module: tvm.IRModule, sources: tuple[str, ...] = ROUNDED, multiple: int = 2) -> tvm.IRModule:
    """Every round_rows of what is read nowhere else, fused with the one of `sources` that computes it, where its width
    is such a multiple.
    """
    return rewrite_functions(_Fuse(module, sources, multiple), module)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule, sources: tuple[str, ...], multiple: int) -> None:
        super().__init__(module)
        self.sources: set[Any] = set()  # variables whose ops are to give bfloat16
        self.gone: set[Any] = set()  # variables that nobody reads then
        self.pairs: dict[Any, tuple[Any, int]] = {}  # what rounding gave -> the source, and its results before it
        for function in module.functions.values():
            if isinstance(function, relax.Function):
                for each in narrowings(function, "round_rows", multiple, sources):
                    self.sources.add(each.source)
                    self.gone |= {each.rows} - {each.source}
                    self.pairs[each.stored] = each.source, each.others

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var in self.gone:
            return
        if binding.var in self.pairs:
            source, others = self.pairs[binding.var]
            made = self.visit_expr(source)
            self.set_var_remap(binding.var, self.builder_.emit(relax.TupleGetItem(made, others)) if others else made)
            return
        if binding.var not in self.sources:
            super().visit_var_binding_(binding)
            return
        found = ops.match(binding.value)
        assert found is not None
        op, tensors, attrs = found
        fused = ops.call(op.name + ENDING, [self.visit_expr(tensor) for tensor in tensors], attrs)
        self.set_var_remap(binding.var, self.builder_.emit(fused, binding.var.name))
