"""Parameters that are packed matrices, in place of plain ones that the function packs: for imported graphs.

lift_weights does the same for models of ours by a pass of TVM's that moves whole computations; here a matrix is only
ever packed, and all other weights stay what they are.
    step(x, w): packed = pack(w); ...  ->  step(x, packed): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops


@dataclass(frozen=True)
class Packed:
    """A parameter: the matrix `name` in `format`."""

    name: str
    format: str
    variable: Any


def take_packed(module: tvm.IRModule, name: str, kept: int) -> tuple[tvm.IRModule, list[Packed]]:
    """The module whose function `name` has its first `kept` parameters and then the packed ones; and these."""
    variable = module.get_global_var(name)
    mutator = _Take()
    function = mutator.visit_expr(module[name])
    params = [*function.params[:kept], *(packed.variable for packed in mutator.found)]
    module = tvm.IRModule(dict(module.functions.items()))
    module.update_func(variable, relax.Function(params, function.body, function.ret_ty, True, function.attrs))
    return relax.transform.DeadCodeElimination()(module), mutator.found


@relax.expr_functor.mutator
class _Take(relax.PyExprMutator):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Packed] = []

    def visit_call_(self, call: Any) -> Any:
        found = ops.match(call)
        if found is None or found[0].name != "pack":
            return super().visit_call_(call)
        (matrix,), attrs = found[1], found[2]
        packed = relax.Var(f"{matrix.name}.packed", call.ty_args[0])
        self.found.append(Packed(str(matrix.name), str(attrs["format"]), packed))
        return packed
