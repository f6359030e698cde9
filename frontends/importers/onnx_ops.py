"""Operators of ONNX whose importers in TVM lose shapes, round otherwise, or read past the end of a table.

Each takes the emitter, its inputs (arrays or expressions) and its attributes, and gives its outputs.
Meanings: https://onnx.ai/onnx/operators/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from llmc.compiler.errors import SourceError
from llmc.frontends.importers import sizes
from llmc.frontends.importers.emitter import Emitter
from llmc.frontends.importers.onnx_constants import axes_of

Attrs = Mapping[str, Any]
Convert = Callable[[Emitter, list[Any], Attrs], "list[Any]"]

INT_MAX = 1 << 31  # ends from here on mean "to the end"


def dtype_of(value: Any) -> str:
    """As NumPy spells it."""
    if isinstance(value, np.ndarray):
        return "int64" if value.dtype == object else str(value.dtype)
    return str(value.ty.dtype.dtype)


def shape_of(to: Emitter, value: Any) -> tuple[Any, ...]:
    """The sizes of an array or an expression."""
    return tuple(value.shape) if isinstance(value, np.ndarray) else to.shape(value)


def aligned(to: Emitter, inputs: list[Any]) -> list[Any]:
    """The inputs of an elementwise operator as tensors whose shapes broadcast, checked when it runs where unproved."""
    tensors = [to.tensor(x) for x in inputs]
    shapes = [to.shape(x) for x in tensors]
    whole = sizes.broadcast(shapes)
    result = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        wanted = whole[len(whole) - len(shape) :]
        fits = [
            size if sizes.is_known(size) and size == 1 else other for size, other in zip(shape, wanted, strict=True)
        ]
        result.append(to.matched(tensor, tuple(fits)))
    return result


def elementwise(function: Callable[..., Any]) -> Convert:
    """An operator of one or more tensors that broadcast, in pairs from the left."""

    def convert(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
        first, *rest = aligned(to, inputs)
        for other in rest:
            first = to.emit(function(first, other))
        return [first]

    return convert


def _where(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    return [to.emit(relax.op.where(*aligned(to, inputs)))]


def _shape(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    shape = shape_of(to, inputs[0])
    start, end = attrs.get("start", 0), attrs.get("end", len(shape))
    return [sizes.as_array(shape[start:end])]


def _size(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    return [sizes.as_array([sizes.product(shape_of(to, inputs[0]))]).reshape(())]


def wanted_sizes(to: Emitter, value: Any, what: str) -> list[Any]:
    """The sizes that an input names. Raises SourceError where they depend on values, not on shapes alone."""
    if not isinstance(value, np.ndarray):
        raise SourceError(f"{what}: its shape is computed from values; llmc wants it to follow from the inputs' shapes")
    return sizes.as_sizes(value, what)


def _reshape(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    data = to.tensor(inputs[0])
    own = to.shape(data)
    wanted = wanted_sizes(to, inputs[1], "Reshape")
    if not attrs.get("allowzero"):
        wanted = [
            own[at] if sizes.is_known(size) and size == 0 and at < len(own) else size for at, size in enumerate(wanted)
        ]
    rest = [size for size in wanted if not (sizes.is_known(size) and size == -1)]
    wanted = [sizes.missing(own, rest) if sizes.is_known(size) and size == -1 else size for size in wanted]
    return [to.emit(relax.op.reshape(data, relax.ShapeExpr([to.need(size) for size in wanted])))]


def _flatten(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    data = to.tensor(inputs[0])
    own = to.shape(data)
    axis = attrs.get("axis", 1)
    axis += len(own) if axis < 0 else 0
    return [to.emit(relax.op.reshape(data, (sizes.product(own[:axis]), sizes.product(own[axis:]))))]


def _expand(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    data = to.tensor(inputs[0])
    own = to.shape(data)
    whole = sizes.broadcast([own, tuple(wanted_sizes(to, inputs[1], "Expand"))])
    if len(whole) == len(own) and all(map(sizes.same, whole, own)):
        return [data]
    return [to.emit(relax.op.broadcast_to(data, relax.ShapeExpr([to.need(size) for size in whole])))]


def _unsqueeze(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    return [to.emit(relax.op.expand_dims(to.tensor(inputs[0]), axes_of(inputs, attrs)))]


def _squeeze(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    return [to.emit(relax.op.squeeze(to.tensor(inputs[0]), axes_of(inputs, attrs)))]


def _slice(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    data = to.tensor(inputs[0])
    own = to.shape(data)
    if len(inputs) < 3:
        inputs = [inputs[0], *(np.array(attrs[key]) for key in ("starts", "ends")),
                  *([np.array(attrs["axes"])] if "axes" in attrs else [])]  # fmt: skip
    starts, ends = (wanted_sizes(to, x, "Slice") for x in inputs[1:3])
    axes = wanted_sizes(to, inputs[3], "Slice") if len(inputs) > 3 and inputs[3] is not None else range(len(starts))
    steps = wanted_sizes(to, inputs[4], "Slice") if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
    begin, end = [], []
    for start, stop, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not sizes.is_known(step) or step < 1:
            raise SourceError(f"Slice with a step of {step}; llmc wants 1 or more")
        begin.append(_clamped(start, own[axis]))
        end.append(_clamped(stop, own[axis]))
    if all(
        sizes.same(b, 0) and sizes.same(e, own[a]) and s == 1
        for b, e, a, s in zip(begin, end, axes, steps, strict=True)
    ):
        return [data]
    first, step_of, count = [0] * len(own), [1] * len(own), list(own)
    for axis, start, stop, step in zip(axes, begin, end, steps, strict=True):
        first[axis], step_of[axis] = start, int(step)
        count[axis] = sizes.maximum(sizes.divide(stop - start + step - 1, step), 0)

    def cut(put: Any, x: Any) -> Any:
        def at(*index: Any) -> Any:
            return x(*(put(a) + i * s for a, i, s in zip(first, index, step_of, strict=True)))

        return te.compute([put(size) for size in count], at, name="slice")

    return [to.compute("slice", [data], [*first, *count, *own], cut)]


def _clamped(place: Any, size: Any) -> Any:
    if sizes.is_known(place):
        if place >= INT_MAX - 1:
            return size
        if place <= -INT_MAX:
            return 0
    from_end = sizes.less(place, 0)
    if sizes.is_known(from_end):
        return sizes.maximum(size + place, 0) if from_end else sizes.minimum(place, size)
    return sizes.choose(from_end, sizes.maximum(size + place, 0), sizes.minimum(place, size))


def _range(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    start, limit, step = (wanted_sizes(to, x, "Range")[0] for x in inputs)
    if not sizes.is_known(step) or step < 1:
        raise SourceError(f"Range with a step of {step}; llmc wants 1 or more where the end depends on the inputs")
    count = sizes.divide(limit - start + step - 1, step)
    kind, count = dtype_of(inputs[0]), to.need(count)

    def numbers(put: Any) -> Any:
        return te.compute((put(count),), lambda i: (put(start) + i * int(step)).astype(kind), name="range")

    return [to.compute("range", [], [start, count], numbers)]


def _constant_of_shape(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    shape = wanted_sizes(to, inputs[0], "ConstantOfShape")
    value = attrs.get("value", np.zeros(1, np.float32)).reshape(-1)[0]
    return [
        to.emit(
            relax.op.full(
                relax.ShapeExpr([to.need(size) for size in shape]),
                relax.const(value, str(value.dtype)),
                str(value.dtype),
            )
        )
    ]


def _concat(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    tensors = [to.tensor(x) for x in inputs]
    shapes = [to.shape(x) for x in tensors]
    axis = attrs["axis"] % len(shapes[0])
    fits = [tuple(a if at == axis else b for at, (a, b) in enumerate(zip(s, shapes[0], strict=True))) for s in shapes]
    return [to.emit(relax.op.concat([to.matched(x, s) for x, s in zip(tensors, fits, strict=True)], axis))]


def _gather(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    """Entries of an axis."""
    data, index = to.tensor(inputs[0]), to.tensor(inputs[1])
    own, picked = to.shape(data), to.shape(index)
    axis = attrs.get("axis", 0) % len(own)
    whole = [*own[:axis], *picked, *own[axis + 1 :]]

    def take(put: Any, x: Any, ids: Any) -> Any:
        def at(*place: Any) -> Any:
            before, inner, after = place[:axis], place[axis : axis + len(picked)], place[axis + len(picked) :]
            return _entry(x, put(own[axis]), ids(*inner), lambda i: (*before, i, *after))

        return te.compute([put(size) for size in whole], at, name="gather")

    return [to.compute("gather", [data, index], [*own, *picked], take)]


def _gather_nd(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    """Entries at vectors of places, which are the last axis of the indices."""
    data, index = to.tensor(inputs[0]), to.tensor(inputs[1])
    own, picked = to.shape(data), to.shape(index)
    batch, depth = attrs.get("batch_dims", 0), picked[-1]
    if not sizes.is_known(depth) or batch + depth > len(own):
        raise SourceError("GatherND whose places have an unknown number of indices")
    whole = [*picked[:-1], *own[batch + depth :]]

    def take(put: Any, x: Any, ids: Any) -> Any:
        def at(*place: Any) -> Any:
            inner, rest = place[: len(picked) - 1], place[len(picked) - 1 :]
            found = [ids(*inner, number) for number in range(depth)]
            ends = [put(own[batch + number]) for number in range(depth)]
            return _entry_at(x, ends, found, lambda at: (*inner[:batch], *at, *rest))

        return te.compute([put(size) for size in whole], at, name="gather_nd")

    return [to.compute("gather_nd", [data, index], [*own, *picked], take)]


def _entry(x: Any, end: Any, index: Any, place: Callable[[Any], tuple[Any, ...]]) -> Any:
    return _entry_at(x, [end], [index], lambda at: place(at[0]))


def _entry_at(x: Any, ends: list[Any], indices: list[Any], place: Callable[[list[Any]], tuple[Any, ...]]) -> Any:
    """An entry; negative indices count from the end.

    One that is out of range gives NaN, or of whole numbers the nearest entry: never what lies beside the table.
    """
    wide = [index.astype("int64") for index in indices]
    wide = [tirx.if_then_else(index < 0, index + end, index) for index, end in zip(wide, ends, strict=True)]
    inside = [
        tirx.max(tirx.min(index, end - 1), tirx.IntImm("int64", 0)) for index, end in zip(wide, ends, strict=True)
    ]
    value = x(*place(inside))
    if not str(x.dtype).startswith("float"):
        return value
    fits: Any = tirx.const(True, "bool")
    for a, b in zip(wide, inside, strict=True):
        fits = tirx.all(fits, tirx.EQ(a, b))
    return tirx.if_then_else(fits, value, tirx.const(float("nan"), str(x.dtype)))


def _is_matrix(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 2 and value.size >= 4096


def _matmul(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    left, right = inputs
    if _is_matrix(right) and isinstance(left, relax.Expr) and dtype_of(left) == "float32" and to.shape(left):
        x = to.matched(left, (*to.shape(left)[:-1], right.shape[0]))
        return [to.linear(x, right, to.name_of(right))]
    a, b = to.tensor(left), to.tensor(right)
    shape_a, shape_b = to.shape(a), to.shape(b)
    if len(shape_a) > 1 and len(shape_b) > 1:
        rows = sizes.broadcast([shape_a[:-2], shape_b[:-2]]) if shape_a[2:] or shape_b[2:] else ()
        inner = shape_a[-1] if sizes.is_known(shape_a[-1]) else shape_b[-2]
        a = to.matched(a, (*_outer(shape_a, rows), shape_a[-2], inner))
        b = to.matched(b, (*_outer(shape_b, rows), inner, shape_b[-1]))
    return [to.emit(relax.op.matmul(a, b))]


def _outer(shape: tuple[Any, ...], rows: tuple[Any, ...]) -> list[Any]:
    own = shape[:-2]
    wanted = rows[len(rows) - len(own) :]
    return [a if sizes.is_known(a) and a == 1 else b for a, b in zip(own, wanted, strict=True)]


def _gemm(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    a, b = inputs[0], inputs[1]
    if isinstance(b, np.ndarray) and attrs.get("transB"):
        b = to.turned(b)
    elif attrs.get("transB"):
        b = to.emit(relax.op.permute_dims(b, [1, 0]))
    if attrs.get("transA"):
        a = to.emit(relax.op.permute_dims(to.tensor(a), [1, 0]))
    (y,) = _matmul(to, [a, b], {})
    if attrs.get("alpha", 1.0) != 1.0:
        y = to.emit(relax.op.multiply(y, relax.const(attrs["alpha"], dtype_of(y))))
    if len(inputs) > 2 and inputs[2] is not None:
        bias = to.tensor(inputs[2])
        if attrs.get("beta", 1.0) != 1.0:
            bias = to.emit(relax.op.multiply(bias, relax.const(attrs["beta"], dtype_of(y))))
        y = to.emit(relax.op.add(y, bias))
    return [y]


def _pow(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    """Powers of 2 and 3 are products: a library's pow is slow, and not of negative numbers everywhere."""
    base, power = inputs
    if isinstance(power, np.ndarray) and power.size == 1 and power.dtype != object and isinstance(base, relax.Expr):
        exponent = power.reshape(-1)[0]
        if exponent in (2, 3) and power.ndim <= len(to.shape(base)):
            square = to.emit(relax.op.multiply(base, base))
            return [square if exponent == 2 else to.emit(relax.op.multiply(square, base))]
    a, b = aligned(to, inputs)
    if dtype_of(a) != dtype_of(b):
        b = to.emit(relax.op.astype(b, dtype_of(a)))
    return [to.emit(relax.op.power(a, b))]


def _cast(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    x = to.tensor(inputs[0])
    return [x if dtype_of(x) == str(np.dtype(attrs["to"])) else to.emit(relax.op.astype(x, str(np.dtype(attrs["to"]))))]


def _is_nan(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    x = to.tensor(inputs[0])
    return [to.emit(relax.op.not_equal(x, x))]


def _dropout(to: Emitter, inputs: list[Any], attrs: Attrs) -> list[Any]:
    return [to.tensor(inputs[0])]


def nearest(to: Emitter, x: Any, name: str) -> Any:
    """Rounded to whole numbers, halves to even ones, as ONNX says."""
    return to.builder.emit_te(
        lambda t: te.compute(t.shape, lambda *i: tirx.nearbyint(t(*i)), name=name), x, primfunc_name_hint=name
    )


OPERATORS: dict[str, Convert] = {
    "Add": elementwise(relax.op.add),
    "Sub": elementwise(relax.op.subtract),
    "Mul": elementwise(relax.op.multiply),
    "Div": elementwise(relax.op.divide),
    "Min": elementwise(relax.op.minimum),
    "Max": elementwise(relax.op.maximum),
    "And": elementwise(relax.op.logical_and),
    "Or": elementwise(relax.op.logical_or),
    "Xor": elementwise(relax.op.logical_xor),
    "Equal": elementwise(relax.op.equal),
    "Less": elementwise(relax.op.less),
    "LessOrEqual": elementwise(relax.op.less_equal),
    "Greater": elementwise(relax.op.greater),
    "GreaterOrEqual": elementwise(relax.op.greater_equal),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "Identity": _dropout,
    "IsNaN": _is_nan,
    "MatMul": _matmul,
    "Pow": _pow,
    "Range": _range,
    "Reshape": _reshape,
    "Round": lambda to, inputs, attrs: [nearest(to, to.tensor(inputs[0]), "round")],
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
