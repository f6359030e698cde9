"""Operators of ONNX on 8-bit integers, as exact arithmetic of floats.

Differences of two bytes are exact in bfloat16, and sums of their products are exact in float32 below 2^24: a product of
matrices goes in slices of columns that short, which are then added as int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from llmc.compiler.errors import SourceError
from llmc.frontends.importers.emitter import Emitter
from llmc.frontends.importers.onnx_constants import axes_of
from llmc.frontends.importers.onnx_ops import Attrs, aligned, dtype_of, nearest

SLICE = 256  # columns; 256 * 255 * 255 < 2^24


def dynamic_quantize(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    """x -> (uint8 codes, scale, zero point), of the range of all values and 0."""
    x = to.tensor(inputs[0])
    zero, most = relax.const(0.0, "float32"), relax.const(255.0, "float32")
    high = to.emit(relax.op.maximum(to.emit(relax.op.max(x)), zero))
    low = to.emit(relax.op.minimum(to.emit(relax.op.min(x)), zero))
    scale = to.emit(relax.op.divide(to.emit(relax.op.subtract(high, low)), most))
    empty = to.emit(relax.op.equal(scale, zero))
    scale = to.emit(relax.op.where(empty, relax.const(1.0, "float32"), scale))  # all values are 0
    point = to.emit(relax.op.negative(to.emit(relax.op.divide(low, scale))))
    point = to.emit(relax.op.clip(nearest(to, point, "zero_point"), 0, 255))
    codes = to.emit(relax.op.add(nearest(to, to.emit(relax.op.divide(x, scale)), "codes"), point))
    codes = to.emit(relax.op.clip(codes, 0, 255))
    return [to.emit(relax.op.astype(codes, "uint8")), scale, to.emit(relax.op.astype(point, "uint8"))]


def matmul_integer(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    """(a - its zero point) times (b - its zero point) -> int32."""
    a, b, zero_a, zero_b = [*inputs, None, None][:4]
    x = _less_zero(to, a, zero_a, -1)
    if isinstance(b, np.ndarray) and b.ndim == 2 and (zero_b is None or isinstance(zero_b, np.ndarray)):
        weights = b.astype(np.float32) - (0 if zero_b is None else zero_b.astype(np.float32))
        columns = weights.shape[0]
        parts = []
        for start in range(0, columns, SLICE):
            stop = min(start + SLICE, columns)
            matrix = to.part(b, weights, start, stop)
            piece = x
            if columns > SLICE:
                piece = to.emit(relax.op.strided_slice(x, [-1 % len(to.shape(x))], [start], [stop]))
            y = to.linear(piece, matrix, f"{to.name_of(b)}.{start}" if columns > SLICE else to.name_of(b), exact=True)
            parts.append(to.emit(relax.op.astype(y, "int32")))
        total = parts[0]
        for part in parts[1:]:
            total = to.emit(relax.op.add(total, part))
        return [total]
    y = _less_zero(to, b, zero_b, 0)
    whole = [to.emit(relax.op.astype(value, "int32")) for value in (x, y)]
    return [to.emit(relax.op.matmul(*whole, out_dtype="int32"))]


def _less_zero(to: Emitter, value: Any, zero: Any, axis: int) -> Any:
    """value - zero as float32; a vector of zero points has one for each row (axis -1) or column (axis 0)."""
    x = to.emit(relax.op.astype(to.tensor(value), "float32"))
    if zero is None:
        return x
    point = to.emit(relax.op.astype(to.tensor(zero), "float32"))
    if len(to.shape(point)) == 1:
        point = to.emit(relax.op.expand_dims(point, axis)) if to.shape(point)[0] != 1 else point
    return to.emit(relax.op.subtract(*aligned(to, [x, point])))


def dequantize_linear(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    """(x - zero point) * scale."""
    x, scale, point = _parts(to, inputs, attrs)
    less = to.emit(relax.op.astype(x, "int32"))
    if point is not None:
        less = to.emit(relax.op.subtract(less, to.emit(relax.op.astype(point, "int32"))))
    return [to.emit(relax.op.multiply(to.emit(relax.op.astype(less, dtype_of(scale))), scale))]


def quantize_linear(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    """round(x / scale) + zero point, within what the type holds."""
    x, scale, point = _parts(to, inputs, attrs)
    kind = "uint8" if point is None else dtype_of(point)
    if kind not in ("uint8", "int8", "uint16", "int16"):
        raise SourceError(f"QuantizeLinear to {kind}; llmc knows: uint8, int8, uint16, int16")
    codes = nearest(to, to.emit(relax.op.divide(x, scale)), "codes")
    if point is not None:
        codes = to.emit(relax.op.add(codes, to.emit(relax.op.astype(point, dtype_of(codes)))))
    held = np.iinfo(kind)
    return [to.emit(relax.op.astype(to.emit(relax.op.clip(codes, held.min, held.max)), kind))]


def _parts(to: Emitter, inputs: list[Any], attrs: Attrs) -> tuple[Any, Any, Any]:
    """x, scale and zero point, those of an axis in a shape that broadcasts."""
    x, scale = to.tensor(inputs[0]), to.tensor(inputs[1])
    point = to.tensor(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else None
    if attrs.get("block_size") or len(to.shape(scale)) > 1:
        raise SourceError("quantization in blocks; llmc knows one scale a tensor or one for each entry of an axis")
    if len(to.shape(scale)) == 1 and to.shape(scale)[0] != 1:
        rank = len(to.shape(x))
        along = [1] * rank
        along[attrs.get("axis", 1) % rank] = to.shape(scale)[0]
        scale = to.emit(relax.op.reshape(scale, along))
        point = None if point is None else to.emit(relax.op.reshape(point, along))
    return x, scale, point


def _reduce(function: Any) -> Any:
    def convert(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
        axes = axes_of(inputs, attrs)
        if axes is None and attrs.get("noop_with_empty_axes"):
            return [to.tensor(inputs[0])]
        return [to.emit(function(to.tensor(inputs[0]), axes or None, bool(attrs.get("keepdims", 1))))]

    return convert


OPERATORS = {
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize,
    "MatMulInteger": matmul_integer,
    "QuantizeLinear": quantize_linear,
    "ReduceMean": _reduce(relax.op.mean),
    "ReduceSum": _reduce(relax.op.sum),
    "ReduceMax": _reduce(relax.op.max),
    "ReduceMin": _reduce(relax.op.min),
}
