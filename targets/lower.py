"""Ops -> kernels: every `llmc.*` call becomes a `call_tir` of a PrimFunc made for its shapes and the target.

What must stay is refused by name: a module is lowered whole or not at all. Only what devices do together stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import ir, relax, sym, tirx

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.compiler.ops.collective import STAYING
from llmc.compiler.rewrite import rewrite_functions
from llmc.targets.attention import (
    attention,
    cross_attention,
    grow_queries,
    heads,
    short_convolution,
    store_kv,
    turn_keys,
)
from llmc.targets.matrices import (
    activated_experts,
    activated_linear,
    bf16_linear,
    block_linear,
    embedding,
    experts,
    experts_bias,
    routing,
    unpacked_linear,
)
from llmc.targets.rows import (
    elementwise,
    norms,
    rope,
    rounding,
    rows,
    sinusoid,
    top,
)
from llmc.targets.target import Target
from llmc.targets.tuned import Tuned, kernel_key

Kernel = Callable[[Target, list[Any], dict[str, Any]], tirx.PrimFunc]
Make = Callable[[str, list[list[Any]], dict[str, Any]], tirx.PrimFunc]  # op, shapes, attributes -> its kernel

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
    "short_convolution": short_convolution.short_convolution,
    "grow_queries": grow_queries.grow_queries,
    "activate": elementwise.activate,
    "gated": elementwise.gated,
    "bounded_gated": elementwise.bounded_gated,
    "xielu": elementwise.xielu,
    "take_rows": rows.take_rows,
    "take_columns": rows.take_columns,
    "own_ids": rows.own_ids,
    "argmax": rows.argmax,
    "top": top.top,
    "packed_linear": block_linear.packed_linear,
    "round_rows": rounding.round_rows,
    "bf16_linear": bf16_linear.bf16_linear,
    "rotate_rows": rounding.rotate_rows,
    **rounding.KERNELS,
    "i8_linear": block_linear.i8_linear,
    "route": routing.route,
    "gate_rows": routing.gate_rows,
    "experts_bias": experts_bias.experts_bias,
    "experts_out_bias": experts_bias.experts_out_bias,
    **activated_linear.KERNELS,
    **unpacked_linear.KERNELS,
    **activated_experts.KERNELS,
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
    return (KERNELS | PLAIN)[name](target, fresh_shapes(shapes), attrs)


def fresh_shapes(shapes: list[list[Any]]) -> list[list[Any]]:
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


@dataclass(frozen=True)
class _Matched:
    """A call that becomes a kernel."""

    name: str
    tensors: list[Any]
    attrs: dict[str, Any]
    outputs: list[Any]  # tensor types

    @property
    def shapes(self) -> list[list[Any]]:
        """Of operands, then of outputs."""
        return [list(kind.shape) for kind in self.types]

    @property
    def types(self) -> list[Any]:
        """Tensor types of operands, then of outputs."""
        return [*(tensor.ty for tensor in self.tensors), *self.outputs]


def _matched(call: Any, plain: bool) -> _Matched | None:
    """The op that a call is of, with `plain` also those of Relax in PLAIN; None for any other."""
    found = ops.match(call)
    if found is not None:
        op, tensors, attrs = found
        if op.name in STAYING:
            return None
        name, out = op.name, call.ty_args[0]
    elif plain and call.op.same_as(ir.Op.get("relax.add")):
        name, tensors, attrs, out = "add", list(call.args), {}, call.ty
    elif plain and call.op.same_as(ir.Op.get("relax.concat")):
        name, tensors, attrs, out = "concat", list(call.args[0].fields), {}, call.ty
    else:
        return None
    return _Matched(name, tensors, attrs, list(out.fields) if isinstance(out, ir.TupleType) else [out])


@relax.expr_functor.mutator
class _Lower(relax.PyExprMutator):
    """`make(name, shapes, attributes)` gives kernels; `plain`: of Relax's own operations too."""

    def __init__(self, module: tvm.IRModule, make: Make, plain: bool = True) -> None:
        super().__init__(module)
        self.make, self.plain = make, plain
        self.kernels: dict[tuple[Any, ...], Any] = {}

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        matched = _matched(call, self.plain)
        return call if matched is None else self._call(matched)

    def _call(self, call: _Matched) -> Any:
        name, shapes, attrs = call.name, call.shapes, call.attrs
        key = (name, tuple(tuple(map(str, s)) for s in shapes), tuple(sorted(attrs.items())))
        if key not in self.kernels:
            made = self.make(name, shapes, attrs)
            self.kernels[key] = self.builder_.add_func(made, name), made
        kernel, made = self.kernels[key]
        workspaces = _workspaces(made, call)
        if workspaces and len(call.outputs) == 1:
            return relax.TupleGetItem(
                self.builder_.emit(relax.call_tir(kernel, call.tensors, [*call.outputs, *workspaces])), 0
            )
        outputs = [*call.outputs, *workspaces]
        return relax.call_tir(kernel, call.tensors, outputs if len(outputs) > 1 else outputs[0])


def _workspaces(kernel: tirx.PrimFunc, call: _Matched) -> list[Any]:
    """Tensor types of what a kernel takes beside operands and outputs, in sizes of the call."""
    given, more = kernel.params[: len(call.types)], kernel.params[len(call.types) :]
    sizes: dict[Any, Any] = {}
    for param, kind in zip(given, call.types, strict=True):
        sizes |= dict(zip(param.shape, kind.shape, strict=True))
    known = sym.Analyzer()
    for own, size in sizes.items():
        if isinstance(own, tirx.Var):
            known.bind(own, size)
    return [relax.TensorType([known.simplify(size) for size in param.shape], str(param.dtype)) for param in more]


def lower(module: tvm.IRModule, target: Target, tuned: Tuned | None = None) -> tvm.IRModule:
    """A module of packed ops -> the same module over kernels, each with its own knobs."""
    return lower_with(module, frozenset(KERNELS), _maker(target, tuned), "targets/lower.py")


def lower_with(module: tvm.IRModule, kernels: frozenset[str], make: Make, where: str) -> tvm.IRModule:
    """The same by kernels that `make` makes: of the ops named in `kernels` and of PLAIN, in a table in file `where`."""
    known = {f"relax.{name}" for name in PLAIN} | {ops.PREFIX + name for name in (*kernels, *STAYING)}
    missing = sorted(calls(module) - known)
    if missing:
        raise LlmcError(f"no kernel for {', '.join(missing)}; run the passes first, or add kernels in {where} KERNELS")
    return rewrite_functions(_Lower(module, make), module)


def lower_ops(module: tvm.IRModule, target: Target, tuned: Tuned | None = None) -> tvm.IRModule:
    """Only the packed ops of a module -> kernels; what else it calls stays, for targets/graphs.py."""
    return rewrite_functions(_Lower(module, _maker(target, tuned), plain=False), module)


def _maker(target: Target, tuned: Tuned | None) -> Make:
    """Kernels for a CPU, each with its own knobs."""
    known = tuned or Tuned()

    def make(name: str, shapes: list[list[Any]], attrs: dict[str, Any]) -> tirx.PrimFunc:
        own = replace(target, knobs=known.knobs(target.knobs, name, shapes, attrs))
        return make_kernel(name, own, shapes, attrs)

    return make


@dataclass
class KernelCall:
    """A kernel that a module will have: of what, and how many places call it. Operands come before outputs."""

    name: str
    shapes: list[list[Any]]
    dtypes: list[str]
    attrs: dict[str, Any]
    count: int = 0


def kernel_calls(module: tvm.IRModule, plain: bool = True) -> dict[str, KernelCall]:
    """The distinct kernels that `lower` (not `plain`: `lower_ops`) makes of a module, by their keys; none is made."""
    found: dict[str, KernelCall] = {}

    def visit(expr: Any) -> None:
        matched = _matched(expr, plain) if isinstance(expr, relax.Call) else None
        if matched is not None:
            key = kernel_key(matched.name, matched.shapes, matched.attrs)
            dtypes = [str(kind.dtype) for kind in matched.types]
            found.setdefault(key, KernelCall(matched.name, matched.shapes, dtypes, matched.attrs)).count += 1

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return found


def calls(module: tvm.IRModule) -> set[str]:
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
