"""Row-wise kernels that round activations: to bfloat16, or to int8 blocks with their scales and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import GROUP, MIDDLE, ceil_to
from llmc.targets.rows.rows import kernel
from llmc.targets.target import Target
from llmc.targets.vector import (
    LANES,
    TOPS,
    chosen,
    f32,
    greatest_of_two,
    held,
    i32,
    lanes,
    registers,
    round_bf16,
    round_int,
    splat,
    sums_of_four,
)


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


def quantize_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) -> int8 codes in words (M, K64/4), scales (M, K64/32), sums and starts (M, 3 K64/32)."""
    width = int(shapes[0][1])

    def body(buffers: list[Any], row: Any) -> None:
        x, *quantized = buffers
        quantize_row(lambda c: _sixteen(x, row, c, width), row, width, quantized)

    return kernel(["float32", *QUANTIZED], shapes, body)


QUANTIZED = ("int32", "float32", "float32", "int32")  # dtypes of codes, scales, sums and starts


def quantize_row(sixteen: Callable[[Any], Any], row: Any, width: int, quantized: list[Any]) -> None:
    """Write a row of quantize_rows' results; `sixteen(c)` gives the numbers from column c on.

    It is asked for each once, also for columns up to the next multiple of 64, which are zeros.
    """
    with T.serial(0, ceil_to(width, GROUP) // GROUP) as group:
        quantize_group([sixteen(group * GROUP + at) for at in range(0, GROUP, LANES)], row, group, quantized)


def quantize_group(numbers: list[Any], row: Any, group: Any, quantized: list[Any]) -> None:
    """Write what quantize_rows gives for two blocks of a row: `numbers` are their 64 columns, float32x16 each.

    What is found of a block or a half, its greatest number or its sum, is found for all of them at once.
    """
    codes, scales, sums, starts = quantized
    blocks = int(scales.shape[1])
    sixteens = [held(sixteen) for sixteen in numbers]
    larger = [T.max(_magnitude(v), _magnitude(w)) for v, w in (sixteens[:2], sixteens[2:])]
    tops = greatest_of_two(*larger)
    scale = held(tops / _of(127.0, TOPS), "float32", TOPS)
    inverse = held(T.Select(tops > _of(0.0, TOPS), _of(127.0, TOPS) / tops, _of(0.0, TOPS)), "float32", TOPS)
    T.buffer_store(scales, chosen(scale, 0, 1), [row, T.ramp(group * 2, 1, 2)])
    rounded = [held(round_int(v * splat(chosen(inverse, at // 2))), "int32") for at, v in enumerate(sixteens)]
    halves = held(sums_of_four(rounded), "int32", 4)
    for totals, own, first in (
        (chosen(halves, 0, 2) + chosen(halves, 1, 3), (0, 1), 0),  # of blocks
        (halves, (0, 0, 1, 1), blocks),
    ):
        count = len(own)
        place = [row, T.ramp(group * count + first, 1, count)]
        T.buffer_store(sums, T.cast(totals, f"float32x{count}") * chosen(scale, *own), place)
        T.buffer_store(starts, totals * T.broadcast(i32(-MIDDLE), count), place)
    for at, words in enumerate(rounded):
        packed = T.reinterpret(T.cast(words, "int8x16"), dtype="int32x4")
        T.buffer_store(codes, packed, [row, T.ramp(group * (GROUP // 4) + at * (LANES // 4), 1, LANES // 4)])


def _magnitude(x: Any) -> Any:
    return T.max(x, splat(f32(0)) - x)


def _of(value: float, count: int) -> Any:
    return T.broadcast(f32(value), count)


def whole_groups(shape: list[Any]) -> int:
    """The columns of (M, K), for kernels that quantize without padding: K must be a multiple of 64."""
    width = int(shape[1])
    if width % GROUP:
        raise LlmcError(f"{width} columns cannot be quantized as they are computed: {GROUP} or a multiple is wanted")
    return width


def _sixteen(x: Any, row: Any, first: Any, width: int) -> Any:
    """x[row, first : first + 16], zeros past the width."""
    if width % GROUP == 0:  # else the last record has columns that the row has not
        return x[row, lanes(first)]
    staged = registers((LANES,), "float32")
    with T.serial(0, LANES) as lane:
        inside = T.if_then_else(first + lane < width, x[row, T.min(first + lane, width - 1)], f32(0))
        T.buffer_store(staged, inside, [lane])
    return staged[lanes(0)]
