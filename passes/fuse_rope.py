"""Queries and keys are turned where attention reads and keeps them: qkv does not go through memory once more for it.

y = attention(rope(qkv, table), pages...) -> y = rope_attention(qkv, table, pages...), if rope turns all heads of both.
It is for targets whose attention does so (`turns_in_attention`).
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.bindings import reads_of


def fuse_rope(module: tvm.IRModule) -> tvm.IRModule:
    """Every rope that one attention alone reads, fused with it."""
    fused = rewrite_functions(_Fuse(module), module)
    return relax.transform.DeadCodeElimination()(fused)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.once: set[Any] = set()  # variables that one expression reads
        for function in module.functions.values():
            if isinstance(function, relax.Function):
                self.once |= {variable for variable, count in reads_of(function).items() if count == 1}

    def visit_call_(self, call: Any) -> Any:
        found = ops.match(call)
        alone = found is not None and found[0].name == "attention" and found[1][0] in self.once
        call = super().visit_call_(call)
        found = ops.match(call)
        if found is None or not alone:
            return call
        _, (qkv, *pages), attrs = found
        rope = ops.match(self.lookup_binding(qkv))
        if rope is None or rope[0].name != "rope" or not _turns_all(rope[2], attrs):
            return call
        x, table = rope[1]
        return ops.call("rope_attention", [x, table, *pages], {**attrs, "layout": rope[2]["layout"]})


def _turns_all(rope: dict[str, Any], attention: dict[str, Any]) -> bool:
    """Whether rope turns all heads of queries and keys, from their first number on."""
    heads = int(attention["heads"]) + int(attention["kv_heads"])
    wanted = {"rotated_heads": heads, "head_dim": int(attention["head_dim"]), "first": 0}
    return all(int(rope[name]) == value for name, value in wanted.items())
