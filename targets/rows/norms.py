"""Kernels that norm rows: RMS norm and layer norm, of a row, of a sum of two, of the heads of q and k."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.rows.elementwise import add_row
from llmc.targets.rows.rounding import ROUNDINGS, Rounding, whole_groups
from llmc.targets.rows.rows import columns, copy_columns, kernel, splat_store
from llmc.targets.target import Target
from llmc.targets.vector import LANES, f32, fma, lanes, reduce_sum, registers, splat

Read = Callable[[Any], Any]  # column -> the sixteen numbers from there on, or the one there


def _sum(width: int, vector: Read, scalar: Read, squared: bool = False) -> Any:
    """The sum of a row's numbers, or of their squares."""
    sums, tail = registers((LANES,), "float32"), registers((1,), "float32")
    splat_store(sums, splat(f32(0)))
    T.buffer_store(tail, f32(0), [0])

    def add(c: Any) -> Any:
        return fma(vector(c), vector(c), sums[lanes(0)]) if squared else sums[lanes(0)] + vector(c)

    columns(
        width,
        lambda c: splat_store(sums, add(c)),
        lambda c: T.buffer_store(tail, tail[0] + (scalar(c) * scalar(c) if squared else scalar(c)), [0]),
    )
    return reduce_sum(sums[lanes(0)]) + tail[0]


def _normed(
    x: Any, weight: Any, bias: Any, row: Any, width: int,
    eps: float, centred: bool, first: Any = 0, weight_first: Any = 0,
) -> tuple[Read, Read]:  # fmt: skip
    """x[row] / sqrt(mean(x[row]^2) + eps) * weight + bias, of the `width` columns from `first` on: sixteen, or one.

    `centred`: their mean is taken off them first, as layer norm does. A bias of None adds nothing. Weights are read
    from `weight_first` on.
    """
    mean, scale = registers((1,), "float32"), registers((1,), "float32")

    def plain(c: Any) -> Any:
        return x[row, lanes(first + c)]

    def plain_one(c: Any) -> Any:
        return x[row, first + c]

    def centre(c: Any) -> Any:
        return plain(c) - splat(mean[0])

    def centre_one(c: Any) -> Any:
        return plain_one(c) - mean[0]

    vector, scalar = (centre, centre_one) if centred else (plain, plain_one)
    if centred:
        T.buffer_store(mean, _sum(width, plain, plain_one) / f32(width), [0])
    squares = _sum(width, vector, scalar, squared=True)
    T.buffer_store(scale, f32(1) / T.sqrt(squares / f32(width) + f32(eps)), [0])

    def weighted(value: Any, at: Any) -> Any:
        return value * weight[at] if bias is None else value * weight[at] + bias[at]

    return (
        lambda c: weighted(vector(c) * splat(scale[0]), lanes(weight_first + c)),
        lambda c: weighted(scalar(c) * scale[0], weight_first + c),
    )


def _norm_row(x: Any, weight: Any, bias: Any, out: Any, row: Any, width: int, first: Any = 0, **how: Any) -> None:
    """out[row] = `_normed` of x[row], in the same columns."""
    vector, scalar = _normed(x, weight, bias, row, width, first=first, **how)
    columns(
        width,
        lambda c: T.buffer_store(out, vector(c), [row, lanes(first + c)]),
        lambda c: T.buffer_store(out, scalar(c), [row, first + c]),
    )


def rms_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), weight (C,) -> (M, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, weight, out = buffers
        _norm_row(x, weight, None, out, row, width, eps=attrs["eps"], centred=False)

    return kernel(["float32"] * 3, shapes, body)


def layer_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), weight (C,), bias (C,) -> (M, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, weight, bias, out = buffers
        _norm_row(x, weight, bias, out, row, width, eps=attrs["eps"], centred=True)

    return kernel(["float32"] * 4, shapes, body)


def add_rms_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x, residual (M, C), weight (C,) -> their sum (M, C), its norm (M, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, residual, weight, total, normed = buffers
        add_row(x, residual, total, row, width)
        _norm_row(total, weight, None, normed, row, width, eps=attrs["eps"], centred=False)

    return kernel(["float32"] * 5, shapes, body)


def add_layer_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x, residual (M, C), weight (C,), bias (C,) -> their sum (M, C), its norm (M, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, residual, weight, bias, total, normed = buffers
        add_row(x, residual, total, row, width)
        _norm_row(total, weight, bias, normed, row, width, eps=attrs["eps"], centred=True)

    return kernel(["float32"] * 6, shapes, body)


def _norm_i8(
    rounding: Rounding, centred: bool, target: Target, shapes: list[Any], attrs: dict[str, Any]
) -> tirx.PrimFunc:
    """x (M, C), weight (C,), of layer norm bias (C,) -> the norm as int8."""
    width = whole_groups(shapes[0])

    def body(buffers: list[Any], row: Any) -> None:
        x, *weights = buffers[: 2 + centred]
        sixteen, _ = _normed(x, weights[0], weights[1] if centred else None, row, width, attrs["eps"], centred)
        rounding.row(sixteen, row, width, buffers[2 + centred :])

    return kernel([*["float32"] * (2 + centred), *rounding.dtypes], shapes, body)


def _add_norm_i8(
    rounding: Rounding, centred: bool, target: Target, shapes: list[Any], attrs: dict[str, Any]
) -> tirx.PrimFunc:
    """x, residual (M, C), weight (C,), of layer norm bias (C,) -> sum (M, C), its norm as int8."""
    width = whole_groups(shapes[0])

    def body(buffers: list[Any], row: Any) -> None:
        x, residual, *weights = buffers[: 3 + centred]
        total, *quantized = buffers[3 + centred :]
        add_row(x, residual, total, row, width)
        sixteen, _ = _normed(total, weights[0], weights[1] if centred else None, row, width, attrs["eps"], centred)
        rounding.row(sixteen, row, width, quantized)

    return kernel([*["float32"] * (4 + centred), *rounding.dtypes], shapes, body)


QUANTIZED_NORMS: dict[str, Any] = {
    f"{before}{norm}{ending}": partial(make, rounding, centred)
    for before, make in (("", _norm_i8), ("add_", _add_norm_i8))
    for norm, centred in (("rms_norm", False), ("layer_norm", True))
    for ending, rounding in ROUNDINGS.items()
}


def qk_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), q_weight, k_weight (D,) or (H D,), (G D,) -> qkv with the heads of q and k normed."""
    size, heads, groups = (int(attrs[name]) for name in ("head_dim", "heads", "kv_heads"))
    centred = {"rms": False, "layer": True}[attrs["kind"]]
    whole, step = {"head": (False, 0), "heads": (False, size), "all": (True, 0)}[attrs["span"]]

    def body(buffers: list[Any], row: Any) -> None:
        x, q_weight, k_weight, out = buffers
        for weight, first, count in ((q_weight, 0, heads), (k_weight, heads, groups)):
            norm = partial(_norm_row, x, weight, None, out, row, eps=attrs["eps"], centred=centred)
            if whole:
                norm(width=count * size, first=first * size)
                continue
            with T.serial(0, count) as head:
                norm(width=size, first=(first + head) * size, weight_first=head * step)
        normed = (heads + groups) * size
        copy_columns(x, out, row, normed, int(shapes[0][1]) - normed)

    return kernel(["float32"] * 4, shapes, body)
