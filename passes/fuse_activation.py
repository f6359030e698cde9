"""An activation that gives int8 or bfloat16 joins the matrices whose results it alone reads: these stay in the caches.

y = i8_linear(x, w); q = gated_i8(y) -> q = i8_linear_gated_i8(x, w), likewise for all of MULTIPLIED, with bf16 too, and
y = concat(i8_experts_in(x, ids, g), i8_experts_in(x, ids, u)); q = gated_i8(y) -> q = i8_experts_gated_i8(x, ids, g, u)
for all of GATED (compiler/ops/quantized.py), with experts_bias of both too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.formats import GROUP
from llmc.compiler.ops import quantized, rounded
from llmc.compiler.ops.narrowed import MULTIPLIED, after_linear
from llmc.compiler.ops.quantized import BIAS, ENDINGS, EXPERTS, GATED, after_experts
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.bindings import bound_in, reads_of

# The linear layers that an op of their result is fused with, by its name.
_LINEAR = {name + ending: quantized.LINEAR for name in MULTIPLIED for ending in ENDINGS.values()} | {
    name + rounded.ENDING: rounded.LINEAR for name in MULTIPLIED
}
_EXPERTS_THEN = {name + ending for name in GATED for ending in ENDINGS.values()}


Joins = Callable[[str, int], bool]  # a matrix's format and columns -> whether kernels join it so


def fuse_activation(module: tvm.IRModule, joins: Joins = lambda format, columns: False) -> tvm.IRModule:
    """Every such activation as one op with its matrices. Where others read their results too all stay as they are.

    joins: of the matrices whose activation gives bfloat16.
    """
    return rewrite_functions(_Fuse(module, joins), module)


@dataclass(frozen=True)
class _Joined:
    """What an activation becomes: an op, its operands as the module has them, and attributes beside its own."""

    name: str
    operands: list[Any]
    attrs: dict[str, Any]


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule, joins: Joins) -> None:
        super().__init__(module)
        self.joins = joins
        self.joined: dict[Any, _Joined] = {}  # what an activation alone reads -> what that becomes
        self.gone: set[Any] = set()  # variables that nobody reads then
        for function in module.functions.values():
            if isinstance(function, relax.Function):
                self._plan(function)

    def _plan(self, function: Any) -> None:
        bound = bound_in(function)
        reads = reads_of(function)
        for value in bound.values():
            found = ops.match(value)
            if found is None or found[0].name not in _LINEAR.keys() | _EXPERTS_THEN:
                continue
            op, (x,), _ = found
            if x not in bound or reads[x] != 1:
                continue
            linear = ops.match(bound[x])
            if linear is not None and linear[0].name == _LINEAR.get(op.name) and self._is_joined(linear):
                self.joined[x] = _Joined(after_linear(linear[0].name, op.name), linear[1], linear[2])
                self.gone.add(x)
            elif _is_concat(bound[x]) and op.name in _EXPERTS_THEN:
                self._plan_experts(op.name, x, bound, reads)

    def _is_joined(self, linear: Any) -> bool:
        op, (x, *_), attrs = linear
        return op.name != rounded.LINEAR or self.joins(str(attrs["format"]), 2 * int(x.ty.shape[1]))

    def _plan_experts(self, name: str, x: Any, bound: dict[Any, Any], reads: Any) -> None:
        found = [_matrix(part, bound, reads) for part in bound[x].args[0].fields]
        matrices = [each for each in found if each is not None]
        if len(found) != 2 or len(matrices) != 2:
            return
        gate, up = matrices
        same = all(_same(a, b, bound) for a, b in zip(gate.left, up.left, strict=True))
        biases = [each.bias for each in matrices if each.bias is not None]
        if same and gate.attrs == up.attrs and len(biases) != 1 and int(gate.attrs["width"]) % GROUP == 0:
            operands = [*gate.left, gate.weight, up.weight, *biases]
            self.joined[x] = _Joined(after_experts(name, bool(biases)), operands, gate.attrs)
            self.gone |= {x, *gate.variables, *up.variables}

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var not in self.gone:
            super().visit_var_binding_(binding)

    def visit_call_(self, call: Any) -> Any:
        found = ops.match(call)
        if found is None or found[0].name not in _LINEAR.keys() | _EXPERTS_THEN or found[1][0] not in self.joined:
            return super().visit_call_(call)
        joined = self.joined[found[1][0]]
        operands = [self.visit_expr(operand) for operand in joined.operands]
        return ops.call(joined.name, operands, joined.attrs | found[2])


@dataclass(frozen=True)
class _Matrix:
    """A matrix of experts and what is added to it, if anything; `variables` are what nobody else reads of it."""

    left: list[Any]
    weight: Any
    bias: Any
    attrs: dict[str, Any]
    variables: tuple[Any, ...]


def _matrix(variable: Any, bound: dict[Any, Any], reads: Any) -> _Matrix | None:
    """What a variable is that is read once, where it is i8_experts_in or that and its experts_bias."""
    found = ops.match(bound[variable]) if variable in bound and reads[variable] == 1 else None
    if found is None:
        return None
    op, operands, attrs = found
    if op.name == EXPERTS:
        return _Matrix(operands[:-1], operands[-1], None, attrs, (variable,))
    if op.name != BIAS:
        return None
    y, ids, bias = operands
    inner = _matrix(y, bound, reads)
    if inner is None or inner.bias is not None or not _same(ids, inner.left[-1], bound):
        return None
    return _Matrix(inner.left, inner.weight, bias, inner.attrs, (variable, *inner.variables))


def _same(one: Any, other: Any, bound: dict[Any, Any]) -> bool:
    """Whether two variables are one, or the same part of one tuple."""
    if one.same_as(other):
        return True
    first, second = bound.get(one), bound.get(other)
    if not isinstance(first, relax.TupleGetItem) or not isinstance(second, relax.TupleGetItem):
        return False
    return bool(first.tuple_value.same_as(second.tuple_value)) and int(first.index) == int(second.index)


def _is_concat(value: Any) -> bool:
    """Whether columns of several stand side by side."""
    is_call = isinstance(value, relax.Call) and value.op.same_as(tvm.ir.Op.get("relax.concat"))
    return is_call and int(value.attrs.axis) == 1 and isinstance(value.args[0], relax.Tuple)
