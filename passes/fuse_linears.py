"""Linear layers that share an input and whose outputs stand side by side become one (q/k/v, gate/up).

One call reads its input once, and one weight stream is longer than two: fewer forks, better prefetch.
Matrices that are to be stored in different formats stay apart.
    concat(linear(x, a), linear(x, b)) -> linear(x, concat(a, b)), biases likewise
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import ir, relax

from llmc.compiler import ops
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.matrices import sources

Choose = Callable[[str], str]  # weight's name -> format


def fuse_linears(module: tvm.IRModule, choose: Choose) -> tvm.IRModule:
    """Float32 linear layers of the unpacked graph -> fewer of them; `choose` gives each weight's format."""
    fused = rewrite_functions(_Fuse(module, choose), module)
    return relax.transform.DeadCodeElimination()(fused)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule, choose: Choose) -> None:
        super().__init__(module)
        self.choose = choose

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if not call.op.same_as(ir.Op.get("relax.concat")) or int(call.attrs.axis) != 1:
            return call
        branches = [self._linear(part) for part in call.args[0].fields]
        if any(branch is None for branch in branches):
            return call
        inputs, weights, biases = zip(*branches, strict=True)
        with_bias = sum(bias is not None for bias in biases)
        if any(not x.same_as(inputs[0]) for x in inputs) or with_bias not in (0, len(biases)):
            return call
        if len({self.choose(name) for w in weights for name in sources(self.lookup_binding, w)}) > 1:
            return call
        weight = self.builder_.emit(relax.op.concat(list(weights), axis=0))
        linear = ops.call("linear", [inputs[0], weight], {})
        if not with_bias:
            return linear
        y = self.builder_.emit(linear)
        return relax.op.add(y, self.builder_.emit(relax.op.concat(list(biases), axis=0)))

    def _linear(self, variable: Any) -> tuple[Any, Any, Any] | None:
        """(x, weight, bias or None) when the variable is bound to a linear layer."""
        value, bias = self.lookup_binding(variable), None
        if isinstance(value, relax.Call) and value.op.same_as(ir.Op.get("relax.add")) and value.args[1].ty.ndim == 1:
            value, bias = self.lookup_binding(value.args[0]), value.args[1]
        found = ops.match(value)
        if found is None or found[0].name != "linear":
            return None
        return found[1][0], found[1][1], bias
