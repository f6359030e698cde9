"""The op table: every `llmc.*` operation that Relax lacks, with its shapes, its meaning in NumPy and its source.

An op appears in a module as `call_dps_packed("llmc.<name>", (tensors..., attributes...), out_ty)`. The meaning is
registered under the same name (`register_meanings`), so a module runs at every stage of the pipeline: what is not yet
lowered to a kernel is computed by its meaning, slowly and obviously.

op.py has what a row is, core.py and its neighbours the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.compiler.ops import (
    attending,
    collective,
    convolution,
    core,
    experts,
    latent,
    quantized,
    rounded,
    turning,
)
from llmc.compiler.ops.op import Attr, Op

__all__ = ["OPS", "PREFIX", "Attr", "Op", "call", "emit", "match", "register_meanings"]

PREFIX = "llmc."
_ROWS = (
    *core.ROWS, *quantized.ROWS, *rounded.ROWS, *attending.ROWS, *convolution.ROWS, *experts.ROWS, *latent.ROWS,
    *turning.ROWS, *collective.ROWS,
)  # fmt: skip
OPS: dict[str, Op] = {op.name: op for op in _ROWS}


def emit(builder: Any, name: str, *tensors: Any, **attrs: Attr) -> Any:
    """Append `llmc.<name>` to a Relax block and return its output variable (a tuple when it has several)."""
    return builder.emit(call(name, tensors, attrs))


def call(name: str, tensors: Sequence[Any], attrs: dict[str, Attr]) -> Any:
    """The Relax call of an op; operands and attributes are checked against the table."""
    from tvm import relax
    from tvm.script import relax as R

    op = OPS[name]
    if len(tensors) != len(op.operands) or set(attrs) != set(op.attrs):
        raise LlmcError(
            f"llmc.{name} takes {op.operands} and {op.attrs}, got {len(tensors)} tensors and {tuple(attrs)}"
        )
    shapes = [tuple(t.ty.shape) if isinstance(t.ty, relax.TensorType) else () for t in tensors]
    shapes = [tuple(_static(size) for size in shape) for shape in shapes]
    outputs = [relax.TensorType(shape, dtype) for shape, dtype in op.result(shapes, attrs)]
    values = [_to_relax(attrs[key], R) for key in op.attrs]
    return relax.call_dps_packed(PREFIX + name, (*tensors, *values), outputs)


def _static(size: Any) -> Any:
    from tvm import tirx

    return int(size) if isinstance(size, tirx.IntImm) else size


def _to_relax(value: Attr, script: Any) -> Any:
    from tvm import tirx

    if isinstance(value, str):
        return script.str(value)
    return script.prim_value(value if isinstance(value, int) else tirx.const(value, "float64"))


def match(expr: Any) -> tuple[Op, list[Any], dict[str, Attr]] | None:
    """(op, tensor operands, attributes) when `expr` is a call of an op of the table, else None."""
    from tvm import ir, relax

    if not isinstance(expr, relax.Call) or not expr.op.same_as(ir.Op.get("relax.call_dps_packed")):
        return None
    symbol = expr.args[0].global_symbol
    if not symbol.startswith(PREFIX) or symbol[len(PREFIX) :] not in OPS:
        return None
    op = OPS[symbol[len(PREFIX) :]]
    fields = list(expr.args[1].fields)
    values = fields[len(op.operands) :]
    return op, fields[: len(op.operands)], dict(zip(op.attrs, map(_from_relax, values), strict=True))


def _from_relax(value: Any) -> Attr:
    plain: Attr = value.value
    return plain


def register_meanings() -> None:
    """Make every op runnable in the Relax VM by its NumPy meaning."""
    import tvm_ffi

    for op in OPS.values():
        tvm_ffi.register_global_func(PREFIX + op.name, _as_packed(op), override=True)


def _as_packed(op: Op) -> Callable[..., None]:
    import numpy as np

    def run(*args: Any) -> None:
        count = len(op.operands)
        arrays = [np.from_dlpack(t) for t in args[:count]]
        attrs = dict(zip(op.attrs, args[count : count + len(op.attrs)], strict=True))
        results = op.meaning(*arrays, **attrs)
        outputs = args[count + len(op.attrs) :]
        for out, value in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
            np.copyto(np.from_dlpack(out), value, casting="no")

    return run
