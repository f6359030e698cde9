"""Round what matrices of block formats are multiplied with to bfloat16: one product on tensor cores, not three.

For targets whose kernels take such x beside weights of any format (docs/cuda.md). Matrices stored as float32 keep it.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.formats import FORMATS, BlockFormat
from llmc.compiler.rewrite import rewrite_functions


def round_activations(module: tvm.IRModule) -> tvm.IRModule:
    """packed_linear over block formats -> bf16_linear; an x that several matrices read is rounded once."""
    return rewrite_functions(_Round(module), module)


@relax.expr_functor.mutator
class _Round(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.rounded: dict[Any, Any] = {}

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        found = ops.match(call)
        if found is None or found[0].name != "packed_linear":
            return call
        _, (x, weight), attrs = found
        if not isinstance(FORMATS[str(attrs["format"])], BlockFormat):
            return call
        if x not in self.rounded:
            self.rounded[x] = self.builder_.emit(ops.call("round_rows", [x], {}))
        return ops.call("bf16_linear", [self.rounded[x], weight], attrs)
