"""Row-wise kernels: norms, activations, RoPE, rounding and quantizing of rows, gathers, argmax.

Each works on one row at a time, in parallel over rows when there are enough of them to pay for a fork.
Column counts that are not a multiple of 16 finish with a scalar loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import BLOCK, GROUP, SUM_BLOCK, ceil_to
from llmc.targets.target import Target
from llmc.targets.vector import (
    LANES,
    exp,
    f32,
    fma,
    i32,
    lanes,
    reduce_max,
    reduce_sum,
    registers,
    round_bf16,
    round_int,
    splat,
)

PARALLEL_ROWS = 16  # fewer rows than this run on one thread: a fork costs about 2 us

Body = Callable[[list[Any], Any], None]


def kernel(dtypes: list[str], shapes: list[Any], body: Body, count: int = 0) -> tirx.PrimFunc:
    """A PrimFunc over buffers of these shapes that runs `body(buffers, row)` for each row of buffer `count`."""
    with IRBuilder() as builder, T.prim_func():
        T.func_attr({"tirx.noalias": True})
        handles = [T.arg(f"a{i}", T.handle()) for i in range(len(dtypes))]
        pairs = zip(handles, shapes, dtypes, strict=True)
        buffers = [T.match_buffer(h, s, d) for h, s, d in pairs]
        rows = shapes[count][0]
        with T.If(rows < PARALLEL_ROWS):
            with T.Then(), T.serial(0, rows) as row:
                body(buffers, row)
            with T.Else(), T.parallel(0, rows) as row:
                body(buffers, row)
    return builder.get()


def _columns(width: int, vector: Callable[[Any], None], scalar: Callable[[Any], None]) -> None:
    """`vector(first column)` for each sixteen columns, then `scalar(column)` for the rest."""
    whole = width // LANES
    if whole:
        with T.serial(0, whole) as step:
            vector(step * LANES)
    if width % LANES:
        with T.serial(0, width % LANES) as rest:
            scalar(whole * LANES + rest)


def _splat_store(buffer: Any, value: Any) -> None:
    T.buffer_store(buffer, value, [lanes(0)])


def _norm_row(x: Any, weight: Any, out: Any, row: Any, width: int, eps: float, first: Any = 0) -> None:
    """out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight, of the `width` columns from `first` on."""
    sums, tail, scale = registers((LANES,), "float32"), registers((1,), "float32"), registers((1,), "float32")
    _splat_store(sums, splat(f32(0)))
    T.buffer_store(tail, f32(0), [0])
    _columns(
        width,
        lambda c: _splat_store(sums, fma(x[row, lanes(first + c)], x[row, lanes(first + c)], sums[lanes(0)])),
        lambda c: T.buffer_store(tail, tail[0] + x[row, first + c] * x[row, first + c], [0]),
    )
    mean = (reduce_sum(sums[lanes(0)]) + tail[0]) / f32(width)
    T.buffer_store(scale, f32(1) / T.sqrt(mean + f32(eps)), [0])
    _columns(
        width,
        lambda c: T.buffer_store(
            out, x[row, lanes(first + c)] * splat(scale[0]) * weight[lanes(c)], [row, lanes(first + c)]
        ),
        lambda c: T.buffer_store(out, x[row, first + c] * scale[0] * weight[c], [row, first + c]),
    )


def rms_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), weight (C,) -> (M, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, weight, out = buffers
        _norm_row(x, weight, out, row, width, attrs["eps"])

    return kernel(["float32"] * 3, shapes, body)


def _copy_columns(x: Any, out: Any, row: Any, first: int, count: int) -> None:
    _columns(
        count,
        lambda c: T.buffer_store(out, x[row, lanes(first + c)], [row, lanes(first + c)]),
        lambda c: T.buffer_store(out, x[row, first + c], [row, first + c]),
    )


def qk_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), q_weight (D,), k_weight (D,) -> qkv with the heads of q and k normed."""
    size, heads, groups = (int(attrs[name]) for name in ("head_dim", "heads", "kv_heads"))
    normed = heads + groups

    def body(buffers: list[Any], row: Any) -> None:
        x, q_weight, k_weight, out = buffers
        with T.serial(0, heads) as head:
            _norm_row(x, q_weight, out, row, size, attrs["eps"], head * size)
        with T.serial(heads, normed) as head:
            _norm_row(x, k_weight, out, row, size, attrs["eps"], head * size)
        _copy_columns(x, out, row, normed * size, int(shapes[0][1]) - normed * size)

    return kernel(["float32"] * 4, shapes, body)


def scale(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C) -> x * factor (M, C)."""
    width, factor = int(shapes[0][1]), f32(attrs["factor"])

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        _columns(
            width,
            lambda c: T.buffer_store(out, x[row, lanes(c)] * splat(factor), [row, lanes(c)]),
            lambda c: T.buffer_store(out, x[row, c] * factor, [row, c]),
        )

    return kernel(["float32"] * 2, shapes, body)


def _add_row(x: Any, y: Any, out: Any, row: Any, width: int) -> None:
    _columns(
        width,
        lambda c: T.buffer_store(out, x[row, lanes(c)] + y[row, lanes(c)], [row, lanes(c)]),
        lambda c: T.buffer_store(out, x[row, c] + y[row, c], [row, c]),
    )


def add_rms_norm(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x, residual (M, C), weight (C,) -> their sum (M, C), its norm (M, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, residual, weight, total, normed = buffers
        _add_row(x, residual, total, row, width)
        _norm_row(total, weight, normed, row, width, attrs["eps"])

    return kernel(["float32"] * 5, shapes, body)


def add(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x, y (M, C) or y (C,) -> (M, C): a residual, or a bias."""
    width = int(shapes[0][1])
    bias = len(shapes[1]) == 1

    def body(buffers: list[Any], row: Any) -> None:
        x, y, out = buffers
        if not bias:
            return _add_row(x, y, out, row, width)
        return _columns(
            width,
            lambda c: T.buffer_store(out, x[row, lanes(c)] + y[lanes(c)], [row, lanes(c)]),
            lambda c: T.buffer_store(out, x[row, c] + y[c], [row, c]),
        )

    return kernel(["float32"] * 3, shapes, body)


def rope_table(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """positions (M,), frequencies (D/2,) -> cosines and sines (M, D)."""
    half = int(shapes[1][0])

    def body(buffers: list[Any], row: Any) -> None:
        positions, frequencies, out = buffers
        with T.serial(0, half) as i:
            angle = T.cast(positions[row], "float32") * frequencies[i]
            T.buffer_store(out, T.cos(angle), [row, i])
            T.buffer_store(out, T.sin(angle), [row, half + i])

    return kernel(["int32", "float32", "float32"], shapes, body)


def rope(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, heads * D), table (M, D) -> x with its first heads rotated."""
    size, rotated = int(attrs["head_dim"]), int(attrs["rotated_heads"])
    half, width = size // 2, int(shapes[0][1])
    stride = {"half": 1, "interleaved": 2}[attrs["layout"]]

    def pair(i: Any) -> tuple[Any, Any]:
        """The two columns of pair i inside a head."""
        return i * stride, i * stride + (half if stride == 1 else 1)

    def body(buffers: list[Any], row: Any) -> None:
        x, table, out = buffers
        with T.serial(0, rotated) as head:

            def rotate(pick: Callable[[Any], tuple[Any, Any]], index: Any, at: Any) -> None:
                first, second = pick(index)
                a, b = x[row, head * size + first], x[row, head * size + second]
                cos, sin = table[row, at], table[row, half + at]
                T.buffer_store(out, a * cos - b * sin, [row, head * size + first])
                T.buffer_store(out, b * cos + a * sin, [row, head * size + second])

            def sixteen(i: Any) -> tuple[Any, Any]:
                first, second = pair(i)
                return T.ramp(first, stride, LANES), T.ramp(second, stride, LANES)

            _columns(half, lambda i: rotate(sixteen, i, lanes(i)), lambda i: rotate(pair, i, i))
        _copy_columns(x, out, row, rotated * size, width - rotated * size)

    return kernel(["float32"] * 3, shapes, body)


def _silu(x: Any) -> Any:
    return x / (splat(f32(1)) + exp(T.min(splat(f32(0)) - x, splat(f32(88)))))


def _gelu_tanh(x: Any) -> Any:
    """x / 2 * (1 + tanh(y)) = x / (1 + e^-2y), y = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    cubic = fma(x * x * x, splat(f32(0.044715)), x)
    exponent = cubic * splat(f32(-2 * math.sqrt(2 / math.pi)))
    return x / (splat(f32(1)) + exp(T.min(exponent, splat(f32(88)))))


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def gated(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """gate_up (M, 2F) -> activation(gate) * up (M, F)."""
    width = int(shapes[1][1])
    if attrs["activation"] not in _ACTIVATIONS:
        raise LlmcError(f"no kernel for activation {attrs['activation']!r}; llmc knows: {', '.join(_ACTIVATIONS)}")
    activation = _ACTIVATIONS[attrs["activation"]]

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        one = registers((LANES,), "float32")

        def scalar(c: Any) -> None:
            _splat_store(one, activation(splat(x[row, c])))
            T.buffer_store(out, one[0] * x[row, width + c], [row, c])

        _columns(
            width,
            lambda c: T.buffer_store(out, activation(x[row, lanes(c)]) * x[row, lanes(width + c)], [row, lanes(c)]),
            scalar,
        )

    return kernel(["float32"] * 2, shapes, body)


def take_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), rows (R,) -> (R, C)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, rows, out = buffers
        _columns(
            width,
            lambda c: T.buffer_store(out, x[rows[row], lanes(c)], [row, lanes(c)]),
            lambda c: T.buffer_store(out, x[rows[row], c], [row, c]),
        )

    return kernel(["float32", "int32", "float32"], shapes, body, count=1)


def argmax(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, V) -> the first index of the greatest value (M,).

    Two passes: the greatest value by vectors, then the first place it stands. A row without any number gives 0.
    """
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        best, tail, place = registers((LANES,), "float32"), registers((1,), "float32"), registers((1,), "int32")
        lowest = f32(float("-inf"))
        _splat_store(best, splat(lowest))
        T.buffer_store(tail, lowest, [0])
        _columns(
            width,
            lambda c: _splat_store(best, T.max(best[lanes(0)], x[row, lanes(c)])),
            lambda c: T.buffer_store(tail, T.max(tail[0], x[row, c]), [0]),
        )
        T.buffer_store(tail, T.max(reduce_max(best[lanes(0)]), tail[0]), [0])
        T.buffer_store(place, i32(0), [0])
        with T.While(T.And(place[0] < width, x[row, place[0]] != tail[0])):
            T.buffer_store(place, place[0] + 1, [0])
        T.buffer_store(out, T.Select(place[0] < width, place[0], i32(0)), [row])

    return kernel(["float32", "int32"], shapes, body)


def round_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) -> bfloat16 pairs (M, ceil(K / 2)) int32, the even column low."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        with T.serial(0, width // 2) as i:
            even, odd = round_bf16(x[row, 2 * i]), round_bf16(x[row, 2 * i + 1])
            T.buffer_store(out, T.bitwise_or(even, T.shift_left(odd, i32(16))), [row, i])
        if width % 2:
            T.buffer_store(out, round_bf16(x[row, width - 1]), [row, width // 2])

    return kernel(["float32", "int32"], shapes, body)


def _absmax_block(x: Any, row: Any, first: Any, width: int, staged: Any) -> Any:
    """Copy block x[row, first : first + 32] into `staged` (zeros past the width); return its greatest magnitude."""
    for half in range(BLOCK // LANES):
        start = first + half * LANES
        if width % GROUP == 0:  # else the last record has columns that the row has not
            T.buffer_store(staged, x[row, lanes(start)], [lanes(half * LANES)])
            continue
        with T.serial(0, LANES) as lane:
            inside = T.if_then_else(start + lane < width, x[row, T.min(start + lane, width - 1)], f32(0))
            T.buffer_store(staged, inside, [half * LANES + lane])
    magnitudes = [T.max(v, splat(f32(0)) - v) for v in (staged[lanes(0)], staged[lanes(LANES)])]
    return reduce_max(T.max(*magnitudes))


def quantize_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) -> int8 codes in words (M, K64/4), scales (M, K64/32), scale * sums of codes (M, 3 K64/32)."""
    width = int(shapes[0][1])
    blocks = ceil_to(width, GROUP) // BLOCK

    def body(buffers: list[Any], row: Any) -> None:
        x, codes, scales, sums = buffers
        with T.serial(0, blocks) as block:
            staged, words = registers((BLOCK,), "float32"), registers((BLOCK,), "int32")
            top, inverse = registers((1,), "float32"), registers((1,), "float32")
            T.buffer_store(top, _absmax_block(x, row, block * BLOCK, width, staged), [0])
            T.buffer_store(inverse, T.Select(top[0] > f32(0), f32(127) / top[0], f32(0)), [0])
            T.buffer_store(scales, top[0] / f32(127), [row, block])
            for half in range(BLOCK // LANES):
                scaled = staged[lanes(half * LANES)] * splat(inverse[0])
                T.buffer_store(words, round_int(scaled), [lanes(half * LANES)])
            halves = [sum((words[i] for i in range(at + 1, at + SUM_BLOCK)), words[at]) for at in (0, SUM_BLOCK)]
            places = [block, blocks + block * 2, blocks + block * 2 + 1]  # sums of 32, then those of 16
            for total, place in zip([halves[0] + halves[1], *halves], places, strict=True):
                T.buffer_store(sums, T.cast(total, "float32") * (top[0] / f32(127)), [row, place])
            for word in range(BLOCK // 4):
                packed = T.bitwise_and(words[4 * word], i32(0xFF))
                for byte in range(1, 4):
                    part = T.shift_left(T.bitwise_and(words[4 * word + byte], i32(0xFF)), i32(8 * byte))
                    packed = T.bitwise_or(packed, part)
                T.buffer_store(codes, packed, [row, block * (BLOCK // 4) + word])

    return kernel(["float32", "int32", "float32", "float32"], shapes, body)


def concat(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """(M, A), (M, B), ... -> (M, A + B + ...): columns side by side."""

    def body(buffers: list[Any], row: Any) -> None:
        *parts, out = buffers
        start = 0
        for part, shape in zip(parts, shapes, strict=False):
            with T.serial(0, int(shape[1])) as column:
                T.buffer_store(out, part[row, column], [row, start + column])
            start += int(shape[1])

    return kernel(["float32"] * len(shapes), shapes, body)
