"""Fewer instructions of the Relax VM for a step: each costs as much as a small kernel, and layers repeat them all.

After memory is planned, layers take the same storage again and again, as tensors of the same shape: one tensor of each
serves them all. Objects that hold no memory of their own need not be given back either.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, relax
from tvm_ffi import structural_equal

_GIVE_BACK = ("relax.memory.kill_tensor", "relax.vm.kill_object")


def share_tensors(module: tvm.IRModule) -> tvm.IRModule:
    """Tensors of one shape and dtype over one storage -> one tensor, made where the first was.

    For a module whose memory is planned: what uses the storage in turn does so through one handle.
    """
    return rewritten(module, _shared)


def drop_idle(module: tvm.IRModule) -> tvm.IRModule:
    """Without tuples that nobody reads, and without giving up what a tuple holds anyway.

    For a module in which `KillAfterLastUse` has given back all it could.
    """
    return rewritten(module, _needed)


def rewritten(module: tvm.IRModule, rewrite: Any) -> tvm.IRModule:
    """The module with `rewrite(bindings, result) -> bindings` done to each Relax function outside its branches."""
    for variable, function in module.functions.items():
        if not isinstance(function, relax.Function) or not isinstance(function.body, relax.SeqExpr):
            continue
        blocks = [relax.BindingBlock(rewrite(list(b.bindings), function.body)) for b in function.body.blocks]
        body = relax.SeqExpr(blocks, function.body.body)
        module.update_func(
            variable, relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
        )
    return relax.transform.Normalize()(module)


def _shared(bindings: list[Any], _: Any) -> list[Any]:
    made: dict[Any, list[Any]] = {}  # storage -> bindings of its tensors
    for place, binding in enumerate(bindings):
        if not calls(binding, "relax.memory.alloc_tensor"):
            continue
        of_storage = made.setdefault(binding.value.args[0], [])
        for other in of_storage:
            if structural_equal(binding.value, other.value):
                bindings[place] = relax.VarBinding(binding.var, other.var)
                break
        else:
            of_storage.append(binding)
    return bindings


def _needed(bindings: list[Any], body: Any) -> list[Any]:
    values = {binding.var: binding.value for binding in bindings}
    read: set[Any] = set()
    relax.analysis.post_order_visit(body, lambda expr: read.update(_parts_read(expr)))
    read.add(body.body)

    def idle(binding: Any) -> bool:
        if isinstance(binding.value, relax.Tuple):
            return binding.var not in read
        return calls(binding, *_GIVE_BACK) and isinstance(
            values.get(binding.value.args[0]), (relax.TupleGetItem, relax.Tuple)
        )

    return [binding for binding in bindings if not idle(binding)]


def _parts_read(expr: Any) -> list[Any]:
    """The variables that an expression is made of, other than to give them back."""
    if isinstance(expr, relax.Call):
        return [] if _is_op(expr, *_GIVE_BACK) else list(expr.args)
    if isinstance(expr, relax.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relax.If):
        return [expr.cond]
    return list(expr.fields) if isinstance(expr, relax.Tuple) else []


def calls(binding: Any, *ops: str) -> bool:
    """Whether a binding is a call of one of these operations."""
    return isinstance(binding.value, relax.Call) and _is_op(binding.value, *ops)


def _is_op(call: Any, *names: str) -> bool:
    return isinstance(call.op, ir.Op) and str(call.op.name) in names
