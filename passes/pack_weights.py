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
from llmc.passes.bindings import bound_in
from llmc.passes.fuse_linears import Choose
from llmc.passes.matrices import MULTIPLYING, sources


def pack_weights(module: tvm.IRModule, choose: Choose, exact: bool = False) -> tvm.IRModule:
    """Float32 matrices -> packed ones; a matrix used twice (a tied head) is packed once.

    `exact` keeps the activations of block formats float32. Raises LlmcError where a format cannot be kept to.
    """
    _refuse_cuts(module, choose)
    return rewrite_functions(_Pack(module, choose, exact), module)


def _refuse_cuts(module: tvm.IRModule, choose: Choose) -> None:
    """Rotated formats of matrices that are multiplied with parts of what is rotated together."""
    faults = []
    for function in module.functions.values():
        bound = bound_in(function) if isinstance(function, relax.Function) else {}
        for found in filter(None, map(ops.match, bound.values())):
            if found[0].name not in MULTIPLYING:
                continue
            name = sources(bound.get, found[1][-1])[0]
            cut = [size for size in _slices(*found) if size % ROTATED]
            if cut and _is_rotated(choose(name)):
                faults.append(
                    f"{name}: multiplied with {' and '.join(map(str, cut))} columns, so not in {choose(name)}"
                )
    if faults:
        raise LlmcError(
            "\n".join(sorted(set(faults)))
            + f"\nrotated formats take {ROTATED} columns together; give these another one with --recipe"
        )


def _is_rotated(name: str) -> bool:
    format = FORMATS[name]
    return isinstance(format, BlockFormat) and format.rotated


def _slices(op: ops.Op, operands: list[Any], attrs: dict[str, ops.Attr]) -> tuple[int, ...]:
    """Widths of the parts of the left side that an op multiplies by themselves."""
    columns = int(operands[-1].ty.shape[1])
    if op.name == "head_linear":
        return columns, int(operands[0].ty.shape[1]) // int(attrs["heads"])
    return (columns,) if op.name == "experts_out" else ()


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
        format = FORMATS[self.choose(sources(self.lookup_binding, weight)[0])]
        width = int(weight.ty.shape[1 if op.name == "embedding" else 0])
        attrs: dict[str, ops.Attr] = {"format": format.name, "width": width}
        packed = self._pack(weight, format.name)
        if op.name == "embedding":
            return self._embedding(left, packed, attrs)
        activation = format.activation
        if op.name == "head_linear":
            attrs |= {"heads": int(found_attrs["heads"]), "columns": int(weight.ty.shape[1])}
        elif op.name != "linear":
            count = int(found_attrs["experts"])
            attrs |= {"experts": count, "width": width // count}
        if activation == "i8" and any(size % GROUP for size in _slices(*found)):
            activation = "f32"  # codes of a slice would not lie by themselves
        return self._multiply(op.name, activation, left, [*rest, packed], attrs)

    def _embedding(self, ids: Any, table: Any, attrs: dict[str, ops.Attr]) -> Any:
        if not _is_rotated(str(attrs["format"])):
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
        format, rotated = str(attrs["format"]), _is_rotated(str(attrs["format"]))
        if activation == "i8" and not self.exact:
            quantize, results = ("quantize_rotated", 3) if rotated else ("quantize_rows", 4)
            left = [self._made(quantize, x, part) for part in block_format(format).left(range(results))]
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
