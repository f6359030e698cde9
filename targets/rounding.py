"""Row-wise kernels that round activations: to bfloat16, or to int8 blocks with their scales and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import BLOCK, GROUP, MIDDLE, ceil_to
from llmc.targets.rows import kernel
from llmc.targets.target import Target
from llmc.targets.vector import (
    LANES,
    f32,
    first_lane,
    greatest,
    held,
    i32,
    lanes,
    registers,
    round_bf16,
    round_int,
    splat,
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
    with T.serial(0, ceil_to(width, GROUP) // BLOCK) as block:
        quantize_block([sixteen(block * BLOCK + at) for at in range(0, BLOCK, LANES)], row, block, quantized)


def quantize_block(numbers: list[Any], row: Any, block: Any, quantized: list[Any]) -> None:
    """Write what quantize_rows gives for a block of a row: `numbers` are its 32 columns, float32x16 twice."""
    codes, scales, sums, starts = quantized
    blocks = int(scales.shape[1])
    halves = [held(sixteen) for sixteen in numbers]
    top = greatest(T.max(*(T.max(v, splat(f32(0)) - v) for v in halves)))
    inverse = held(T.Select(top > splat(f32(0)), splat(f32(127)) / top, splat(f32(0))))
    scale = registers((1,), "float32")
    T.buffer_store(scale, first_lane(top) / f32(127), [0])
    T.buffer_store(scales, scale[0], [row, block])
    rounded = [held(round_int(v * inverse), "int32") for v in halves]
    totals = [T.call_llvm_pure_intrin("llvm.vector.reduce.add", v, dtype="int32") for v in rounded]
    places = [block, blocks + block * 2, blocks + block * 2 + 1]  # sums of 32, then those of 16
    for total, place in zip([totals[0] + totals[1], *totals], places, strict=True):
        T.buffer_store(sums, T.cast(total, "float32") * scale[0], [row, place])
        T.buffer_store(starts, total * i32(-MIDDLE), [row, place])
    for number, words in enumerate(rounded):
        packed = T.reinterpret(T.cast(words, "int8x16"), dtype="int32x4")
        T.buffer_store(codes, packed, [row, T.ramp(block * (BLOCK // 4) + number * (LANES // 4), 1, LANES // 4)])


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
