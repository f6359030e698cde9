"""What operators of ONNX compute where all their inputs are known when the graph is read: constants, shapes, indices.

An array of dtype object holds symbolic sizes (sizes.py). A function returns None where it cannot tell.
Meanings: https://onnx.ai/onnx/operators/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.frontends.importers import sizes

Array = NDArray[Any]
Fold = Callable[[list[Any], Mapping[str, Any]], "Array | None"]

MOST_VALUES = 1 << 24  # that a constant may grow to: what an operator makes of a few numbers is not to fill the memory


def fold(op: str, inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    """The output of an operator of arrays, or None where it is not known."""
    if op not in FOLDS:
        return None
    symbolic = any(isinstance(x, np.ndarray) and x.dtype == object for x in inputs)
    if symbolic and op not in SYMBOLIC:
        return None
    with np.errstate(all="ignore"):
        result = FOLDS[op](inputs, attrs)
    if result is None or result.dtype != object:
        return result
    flat = [sizes.simplify(v) if not isinstance(v, (bool, np.bool_)) else bool(v) for v in result.reshape(-1)]
    if all(map(sizes.is_known, flat)):
        kind = np.bool_ if flat and all(isinstance(v, bool) for v in flat) else np.int64
        return np.array(flat, kind).reshape(result.shape)
    known = np.empty(len(flat), object)
    known[:] = flat
    return known.reshape(result.shape)


def bounded(shape: list[Any], what: str) -> tuple[int, ...] | None:
    """The shape of an array that is to be made, None where it is not known. Raises SourceError for a huge one."""
    if not all(map(sizes.is_known, shape)):
        return None
    if any(size < 0 for size in shape) or math.prod(shape) > MOST_VALUES:
        raise SourceError(f"{what} makes a constant of shape {shape}, wanted at most {MOST_VALUES} values")
    return tuple(int(size) for size in shape)


def _symbolic(inputs: list[Any]) -> bool:
    return any(x.dtype == object for x in inputs)


def _binary(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Fold:
    def run(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
        bounded(list(np.broadcast_shapes(*(x.shape for x in inputs))), "broadcasting")
        a, b = inputs
        if not _symbolic(inputs):
            return np.asarray(plain(a, b))
        return np.asarray(np.frompyfunc(symbolic, 2, 1)(a.astype(object), b.astype(object)), object)

    return run


def _many(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Fold:
    pair = _binary(plain, symbolic)

    def run(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
        result = inputs[0]
        for other in inputs[1:]:
            merged = pair([result, other], attrs)
            assert merged is not None
            result = merged
        return result

    return run


def _unary(function: Callable[[Any], Any]) -> Fold:
    return lambda inputs, attrs: np.asarray(function(inputs[0])).astype(inputs[0].dtype, copy=False)


def _div(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        if (b == 0).any():
            raise SourceError("Div of whole numbers by 0")
        return np.asarray(np.trunc(a / b)).astype(a.dtype)
    return np.asarray(a / b)


def _mod(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    a, b = inputs
    if _symbolic(inputs) or (b == 0).any():
        return None
    return np.asarray(np.fmod(a, b) if attrs.get("fmod") else np.mod(a, b))


def _cast(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    kind = np.dtype(attrs["to"])
    if inputs[0].dtype == object:
        return inputs[0] if kind.kind in "iu" else None
    return np.asarray(inputs[0].astype(kind))


def _gather(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    data, indices = inputs
    if indices.dtype == object:
        return None
    axis = attrs.get("axis", 0)
    shape = [*data.shape[: axis % max(1, data.ndim)], *indices.shape, *data.shape[axis % max(1, data.ndim) + 1 :]]
    bounded(shape, "Gather")
    try:
        return np.asarray(np.take(data, indices, axis))
    except IndexError as error:
        raise SourceError(f"Gather: {error}") from None


def _slice(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    if len(inputs) < 3:
        if "starts" not in attrs:
            return None
        starts, ends = attrs["starts"], attrs["ends"]
        axes = attrs.get("axes") or range(len(starts))
        steps: Any = [1] * len(starts)
    else:
        if any(x is not None and x.dtype == object for x in inputs[1:]):
            return None
        starts, ends = inputs[1], inputs[2]
        axes = inputs[3] if len(inputs) > 3 and inputs[3] is not None else range(len(starts))
        steps = inputs[4] if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
    cut: list[Any] = [slice(None)] * inputs[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[int(axis)] = slice(int(start), None if step < 0 and end < -(1 << 30) else int(end), int(step))
    return np.asarray(inputs[0][tuple(cut)])


def axes_of(inputs: list[Any], attrs: Mapping[str, Any]) -> list[int] | None:
    """The axes of Squeeze, Unsqueeze and reductions: an attribute before opset 13, an input since."""
    if len(inputs) > 1 and inputs[1] is not None:
        if not isinstance(inputs[1], np.ndarray) or inputs[1].dtype == object:
            raise SourceError("axes that are computed; llmc wants them as constants")
        return [int(axis) for axis in inputs[1].reshape(-1)]
    return [int(axis) for axis in attrs["axes"]] if "axes" in attrs else None


def _unsqueeze(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    return np.expand_dims(inputs[0], tuple(axes_of(inputs, attrs) or ()))


def _squeeze(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    axes = axes_of(inputs, attrs)
    return np.squeeze(inputs[0], None if axes is None else tuple(axes))


def _reshape(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    data, shape = inputs
    if shape.dtype == object or (attrs.get("allowzero") and 0 in shape):
        return None
    return np.reshape(data, [data.shape[i] if size == 0 else int(size) for i, size in enumerate(shape)])


def _expand(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    shape = bounded(sizes.as_sizes(inputs[1], "Expand"), "Expand")
    if shape is None:
        return None
    whole = bounded(list(np.broadcast_shapes(inputs[0].shape, shape)), "Expand")
    return None if whole is None else np.broadcast_to(inputs[0], whole).copy()


def _constant_of_shape(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    shape = bounded(sizes.as_sizes(inputs[0], "ConstantOfShape"), "ConstantOfShape")
    value = attrs.get("value", np.zeros(1, np.float32))
    return None if shape is None else np.full(shape, value.reshape(-1)[0], value.dtype)


def _range(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    if _symbolic(inputs):
        return None
    start, limit, step = (x.reshape(-1)[0] for x in inputs)
    if step == 0:
        raise SourceError("Range with a step of 0")
    bounded([max(0, math.ceil((limit.item() - start.item()) / step.item()))], "Range")
    numbers: Array = np.arange(start, limit, step).astype(inputs[0].dtype)
    return numbers


def _reduce_prod(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    axes = axes_of(inputs, attrs)
    keep = bool(attrs.get("keepdims", 1))
    if axes not in (None, [0], [-1]) or inputs[0].ndim != 1:
        return None
    return sizes.as_array([sizes.product(inputs[0])]).reshape([1] if keep else [])


def _where(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    bounded(list(np.broadcast_shapes(*(x.shape for x in inputs))), "Where")
    if not _symbolic(inputs):
        return np.asarray(np.where(*inputs))
    condition, a, b = (x.astype(object) for x in inputs)
    return np.asarray(np.frompyfunc(sizes.choose, 3, 1)(condition, a, b), object)


def _transpose(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    return np.ascontiguousarray(np.transpose(inputs[0], attrs.get("perm")))


def _concat(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    return np.concatenate(inputs, attrs["axis"])


def dequantize(inputs: list[Any], attrs: Mapping[str, Any]) -> Array | None:
    """(x - zero point) * scale, along an axis where they are vectors; None for blocks."""
    x, scale = inputs[0], inputs[1]
    zero = inputs[2] if len(inputs) > 2 and inputs[2] is not None else np.zeros(scale.shape, x.dtype)
    if attrs.get("block_size") or scale.ndim > 1 or x.dtype.kind not in "iu":
        return None
    if scale.ndim == 1 and scale.size > 1:
        along = [1] * x.ndim
        along[int(attrs.get("axis", 1))] = scale.size
        scale, zero = scale.reshape(along), zero.reshape(along)
    elif scale.ndim == 1:
        scale, zero = scale.reshape(()), zero.reshape(())
    return np.asarray((x.astype(np.int32) - zero.astype(np.int32)).astype(scale.dtype) * scale)


FOLDS: dict[str, Fold] = {
    "Add": _binary(np.add, lambda a, b: a + b),
    "Sub": _binary(np.subtract, lambda a, b: a - b),
    "Mul": _binary(np.multiply, lambda a, b: a * b),
    "Div": _binary(_div, sizes.divide),
    "Mod": _mod,
    "Min": _many(np.minimum, sizes.minimum),
    "Max": _many(np.maximum, sizes.maximum),
    "Equal": _binary(np.equal, sizes.equal),
    "Less": _binary(np.less, sizes.less),
    "Greater": _binary(np.greater, lambda a, b: sizes.less(b, a)),
    "Pow": lambda inputs, attrs: np.power(*inputs).astype(inputs[0].dtype),
    "And": _binary(np.logical_and, lambda a, b: None),
    "Or": _binary(np.logical_or, lambda a, b: None),
    "Not": _unary(np.logical_not),
    "Neg": _unary(np.negative),
    "Abs": _unary(np.abs),
    "Sqrt": _unary(np.sqrt),
    "Exp": _unary(np.exp),
    "Log": _unary(np.log),
    "Floor": _unary(np.floor),
    "Ceil": _unary(np.ceil),
    "Reciprocal": _unary(np.reciprocal),
    "Identity": lambda inputs, attrs: inputs[0],
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DequantizeLinear": dequantize,
    "Expand": _expand,
    "Gather": _gather,
    "Range": _range,
    "ReduceProd": _reduce_prod,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}

# Those whose functions take symbolic sizes.
SYMBOLIC = {
    "Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Neg", "Equal", "Less", "Greater", "Where", "Identity", "Cast",
    "Concat", "Gather", "ReduceProd", "Reshape", "Slice", "Squeeze", "Unsqueeze", "Expand", "ConstantOfShape", "Range",
}  # fmt: skip
