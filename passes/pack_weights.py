"""Choose a stored format for every matrix and say so in the graph: linear and embedding become their packed forms.

Packing is an op on the weight (`llmc.pack`), so the module still runs; `lift_weights` then moves it to compile time.
The format also decides the left side: float32, rounded to bfloat16, or int8 blocks. Beside a rotated format all of them
are rotated, and rows of such an embedding are rotated back.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, GROUP, ROTATED, BlockFormat, block_format, ceil_to
from llmc.compiler.rewrite import rewrite_functions
from llmc.passes.fuse_linears import Choose
from llmc.passes.matrices import MULTIPLYING, sources


def pack_weights(module: tvm.IRModule, choose: Choose, exact: bool = False) -> tvm.IRModule:
    """Float32 matrices -> packed ones; a matrix used twice (a tied head) is packed once.

    `exact` keeps the activations of block formats float32.
    """
    return rewrite_functions(_Pack(module, choose, exact), module)


@relax.expr_functor.mutator
class _Pack(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule, choose: Choose, exact: bool) -> None:
        super().__init__(module)
        self.choose, self.exact = choose, exact
        self.packed: dict[Any, Any] = {}
        self.made: dict[Any, Any] = {}  # (op, what several matrices read, part of the result) -> that, once

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        found = ops.match(call)
        if found is None or found[0].name not in MULTIPLYING:
            return call
        op, (left, *rest, weight), found_attrs = found
        name = sources(self.lookup_binding, weight)[0]
        format = FORMATS[self.choose(name)]
        rotated = isinstance(format, BlockFormat) and format.rotated
        width = int(weight.ty.shape[1 if op.name == "embedding" else 0])
        attrs: dict[str, ops.Attr] = {"format": format.name, "width": width}
        packed = self._pack(weight, format.name)
        if op.name == "embedding":
            return self._embedding(left, packed, attrs, rotated)
        activation, columns = format.activation, int(weight.ty.shape[1])
        slices: tuple[int, ...] = ()  # widths of the parts of the left side that are multiplied by themselves
        if op.name == "head_linear":
            heads = int(found_attrs["heads"])
            attrs |= {"heads": heads, "columns": columns}
            slices = columns, int(left.ty.shape[1]) // heads
        elif op.name != "linear":
            count = int(found_attrs["experts"])
            attrs |= {"experts": count, "width": width // count}
            slices = (columns,) if op.name == "experts_out" else ()
        if any(size % GROUP for size in slices) and rotated:
            raise LlmcError(
                f"{name}: {format.name} rotates columns by {ROTATED}s, and this matrix is multiplied with slices of "
                f"{' and '.join(map(str, slices))}; a recipe gives it another format"
            )
        if activation == "i8" and any(size % GROUP for size in slices):
            activation = "f32"  # codes of a slice would not lie by themselves
        return self._multiply(op.name, activation, left, [*rest, packed], attrs)

    def _embedding(self, ids: Any, table: Any, attrs: dict[str, ops.Attr], rotated: bool) -> Any:
        if not rotated:
            return ops.call("packed_embedding", [ids, table], attrs)
        whole = ops.call("packed_embedding", [ids, table], attrs | {"width": ceil_to(int(attrs["width"]), ROTATED)})
        return ops.call("rotate_rows", [self.builder_.emit(whole)], {"width": attrs["width"]})

    def _pack(self, weight: Any, format: str) -> Any:
        key = (weight, format)
        if key not in self.packed:
            self.packed[key] = self.builder_.emit(ops.call("pack", [weight], {"format": format}))
        return self.packed[key]

    def _multiply(self, name: str, activation: str, x: Any, rest: list[Any], attrs: dict[str, ops.Attr]) -> Any:
        """The packed form of an op whose last operand has become a packed weight."""
        if activation == "bf16":
            return ops.call(f"bf16_{name}", [self._made("round_rows", x), *rest], attrs)
        format = FORMATS[str(attrs["format"])]
        rotated = isinstance(format, BlockFormat) and format.rotated
        if activation == "i8" and not self.exact:
            quantize, results = ("quantize_rotated", 3) if rotated else ("quantize_rows", 4)
            left = [self._made(quantize, x, part) for part in block_format(format.name).left(range(results))]
            return ops.call(f"i8_{name}", [*left, *rest], attrs)
        if rotated:
            x = self._made("rotate_rows", x, width=ceil_to(int(x.ty.shape[1]), ROTATED))
        return ops.call(f"packed_{name}", [x, *rest], attrs)

    def _made(self, op: str, x: Any, part: int | None = None, **attrs: ops.Attr) -> Any:
        """What `op` makes of x, or a part of it: matrices that read the same x share it."""
        if (op, x, part) not in self.made:
            made = ops.call(op, [x], attrs) if part is None else relax.TupleGetItem(self._made(op, x), part)
            self.made[op, x, part] = self.builder_.emit(made)
        return self.made[op, x, part]
