"""Ops -> kernels: every `llmc.*` call becomes a `call_tir` of a PrimFunc made for its shapes and the target.

What must stay is refused by name: a module is lowered whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import ir, relax, tirx

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.compiler.rewrite import rewrite_functions
from llmc.targets import (
    attention,
    block_linear,
    cross_attention,
    elementwise,
    embedding,
    experts,
    experts_bias,
    grow_queries,
    heads,
    linear,
    norms,
    rope,
    rounding,
    routing,
    rows,
    sinusoid,
    store_kv,
    top,
    turn_keys,
)
from llmc.targets.target import Target

Kernel = Callable[[Target, list[Any], dict[str, Any]], tirx.PrimFunc]

KERNELS: dict[str, Kernel] = {
    "packed_embedding": embedding.packed_embedding,
    "rms_norm": norms.rms_norm,
    "layer_norm": norms.layer_norm,
    "add_rms_norm": norms.add_rms_norm,
    "add_layer_norm": norms.add_layer_norm,
    "qk_norm": norms.qk_norm,
    "scale": elementwise.scale,
    "clip": elementwise.clip,
    "soft_cap": elementwise.soft_cap,
    "rope_table": rope.rope_table,
    "rope": rope.rope,
    "sinusoid": sinusoid.sinusoid,
    "attention": attention.attention,
    "attention_with_sinks": attention.attention_with_sinks,
    "attention_by_distance": attention.attention_by_distance,
    "cross_attention": cross_attention.cross_attention,
    "store_kv": store_kv.store_kv,
    "grow_queries": grow_queries.grow_queries,
    "activate": elementwise.activate,
    "gated": elementwise.gated,
    "bounded_gated": elementwise.bounded_gated,
    "xielu": elementwise.xielu,
    "take_rows": rows.take_rows,
    "argmax": rows.argmax,
    "top": top.top,
    "packed_linear": block_linear.packed_linear,
    "round_rows": rounding.round_rows,
    "bf16_linear": linear.bf16_linear,
    "quantize_rows": rounding.quantize_rows,
    "i8_linear": block_linear.i8_linear,
    "route": routing.route,
    "gate_rows": routing.gate_rows,
    "experts_bias": experts_bias.experts_bias,
    "experts_out_bias": experts_bias.experts_out_bias,
    **norms.QUANTIZED_NORMS,
    **elementwise.QUANTIZED_ACTIVATIONS,
    **experts.KERNELS,
    **heads.KERNELS,
    **turn_keys.KERNELS,
}


# Relax's own operations that are lowered as ours are.
PLAIN: dict[str, Kernel] = {"add": elementwise.add, "concat": rows.concat}


def make_kernel(name: str, target: Target, shapes: list[list[Any]], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """The kernel of an op for these shapes (operands, then outputs); symbolic sizes are fresh variables."""
    return (KERNELS | PLAIN)[name](target, _fresh(shapes), attrs)


def _fresh(shapes: list[list[Any]]) -> list[list[Any]]:
    """The same shapes over variables of their own: a PrimFunc may not share the graph's symbolic sizes."""
    names: dict[Any, Any] = {}

    def size(value: Any) -> Any:
        if isinstance(value, (int, tirx.IntImm)):
            return int(value)
        # A product of sizes, as imported graphs have them, is a size of its own to a kernel.
        if not isinstance(value, tirx.Var):
            return names.setdefault(str(value), tirx.Var("size", "int64"))
        return names.setdefault(value, tirx.Var(value.name, "int64"))

    return [[size(s) for s in shape] for shape in shapes]


@relax.expr_functor.mutator
class _Lower(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule, target: Target, plain: bool = True) -> None:
        super().__init__(module)
        self.target, self.plain = target, plain
        self.kernels: dict[tuple[Any, ...], Any] = {}

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        found = ops.match(call)
        if found is not None:
            op, tensors, attrs = found
            return self._call(op.name, tensors, attrs, call.ty_args[0])
        if not self.plain:
            return call
        if call.op.same_as(ir.Op.get("relax.add")):
            return self._call("add", list(call.args), {}, call.ty)
        if call.op.same_as(ir.Op.get("relax.concat")):
            return self._call("concat", list(call.args[0].fields), {}, call.ty)
        return call

    def _call(self, name: str, tensors: list[Any], attrs: dict[str, Any], out: Any) -> Any:
        outputs = list(out.fields) if isinstance(out, ir.TupleType) else [out]
        shapes = [list(t.ty.shape) for t in tensors] + [list(t.shape) for t in outputs]
        key = (name, tuple(tuple(map(str, s)) for s in shapes), tuple(sorted(attrs.items())))
        if key not in self.kernels:
            kernel = make_kernel(name, self.target, shapes, attrs)
            self.kernels[key] = self.builder_.add_func(kernel, name)
        return relax.call_tir(self.kernels[key], tensors, outputs if len(outputs) > 1 else outputs[0])


def lower(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """A module of packed ops -> the same module over kernels."""
    missing = sorted(_calls(module) - {f"relax.{name}" for name in PLAIN} - {ops.PREFIX + name for name in KERNELS})
    if missing:
        raise LlmcError(
            f"no kernel for {', '.join(missing)}; run the passes first, or add kernels in targets/lower.py KERNELS"
        )
    return rewrite_functions(_Lower(module, target), module)


def lower_ops(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Only the packed ops of a module -> kernels; what else it calls stays, for targets/graphs.py."""
    return rewrite_functions(_Lower(module, target, plain=False), module)


def _calls(module: tvm.IRModule) -> set[str]:
    """Names of the operations a module calls, ours by their own names."""
    names: set[str] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call):
            found = ops.match(expr)
            names.add(ops.PREFIX + found[0].name if found else str(expr.op.name))

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return names
