"""Rope goes into the attention that alone reads what it gives, and stays where it does something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.spec import example
from llmc.frontends.graph.build import build
from llmc.passes.fuse_rope import fuse_rope


def counted(module: tvm.IRModule) -> dict[str, int]:
    """How often the step has each op of these."""
    found = {"rope": 0, "attention": 0, "rope_attention": 0}
    for block in module["step"].body.blocks:
        for binding in block.bindings:
            match = ops.match(binding.value)
            if match is not None and match[0].name in found:
                found[match[0].name] += 1
    return found


def test_every_layer_is_fused() -> None:
    module = build(example())
    assert counted(module) == {"rope": 2, "attention": 2, "rope_attention": 0}
    fused = fuse_rope(module)
    assert counted(fused) == {"rope": 0, "attention": 0, "rope_attention": 2}
    call = next(b.value for block in fused["step"].body.blocks for b in block.bindings if _named(b.value))
    _, (qkv, table, *_), attrs = ops.match(call)
    assert (int(qkv.ty.shape[1]), int(table.ty.shape[1])) == (64, 8)
    told = {"heads": 4, "kv_heads": 2, "head_dim": 8, "layout": "half"}
    assert {name: attrs[name] for name in told} == told


def _named(value: object) -> bool:
    match = ops.match(value)
    return match is not None and match[0].name == "rope_attention"


def test_layers_without_rope_stay() -> None:
    spec = replace(example(), position=replace(example().position, plain_layers=(1,)))
    assert counted(fuse_rope(build(spec))) == {"rope": 0, "attention": 1, "rope_attention": 1}


@pytest.mark.parametrize("change", ["grown queries", "read twice", "other heads"])
def test_rope_that_others_read_stays(change: str) -> None:
    module = build(example())
    assert counted(fuse_rope(_changed(module, change)))["rope"] > 0


def _changed(module: tvm.IRModule, change: str) -> tvm.IRModule:
    """The module with something between rope and attention, another reader, or fewer turned heads."""

    @relax.expr_functor.mutator
    class Change(relax.PyExprMutator):
        def visit_call_(self, call: relax.Call) -> relax.Call:
            call = super().visit_call_(call)
            found = ops.match(call)
            if found is None or found[0].name != "rope":
                return call
            _, tensors, attrs = found
            if change == "other heads":
                return ops.call("rope", tensors, {**attrs, "rotated_heads": 4})
            turned = self.builder_.emit(call)
            if change == "read twice":
                return relax.op.add(turned, turned)
            return ops.call("scale", [turned], {"factor": 2.0})

    mutator = Change(module)
    for variable, function in module.functions.items():
        mutator.builder_.update_func(variable, mutator.visit_expr(function))
    return mutator.builder_.get()
