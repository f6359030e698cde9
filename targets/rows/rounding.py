"""Row-wise kernels that round activations: to bfloat16, or to int8 blocks with their scales and sums.

Those that rotated formats are multiplied with are rotated first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import GROUP, MIDDLE, ceil_to
from llmc.compiler.ops.quantized import ENDINGS
from llmc.compiler.ops.rounded import ENDING
from llmc.targets.rows.rotation import rotated
from llmc.targets.rows.rows import kernel
from llmc.targets.target import Target
from llmc.targets.vector import (
    LANES,
    TOPS,
    chosen,
    even_bf16,
    f32,
    greatest,
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
    if width % GROUP == 0:
        return BF16.rows(target, shapes, attrs)

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        with T.serial(0, width // 2) as i:
            even, odd = round_bf16(x[row, 2 * i]), round_bf16(x[row, 2 * i + 1])
            T.buffer_store(out, T.bitwise_or(even, T.shift_left(odd, i32(16))), [row, i])
        if width % 2:
            T.buffer_store(out, round_bf16(x[row, width - 1]), [row, width // 2])

    return kernel(["float32", "int32"], shapes, body)


# group(numbers, row, number, buffers): writes what 64 columns are rounded, float32x16 each sixteen of them
Group = Callable[[list[Any], Any, Any, list[Any]], None]


@dataclass(frozen=True)
class Rounding:
    """A way to round rows: dtypes of what it gives, and what it does with 64 columns."""

    dtypes: tuple[str, ...]
    group: Group

    def row(self, sixteen: Callable[[Any], Any], row: Any, width: int, quantized: list[Any]) -> None:
        """Write a row of results; `sixteen(c)` gives the numbers from column c on.

        It is asked for each once, also for columns up to the next multiple of 64, which are zeros.
        """
        with T.serial(0, ceil_to(width, GROUP) // GROUP) as group:
            self.group([sixteen(group * GROUP + at) for at in range(0, GROUP, LANES)], row, group, quantized)

    def rows(self, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
        """x (M, K) -> what it is rounded."""
        width = int(shapes[0][1])

        def body(buffers: list[Any], row: Any) -> None:
            x, *quantized = buffers
            self.row(lambda c: _sixteen(x, row, c, width), row, width, quantized)

        return kernel(["float32", *self.dtypes], shapes, body)


def rotate_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K) -> (M, width): every 64 columns rotated."""
    columns, width = int(shapes[0][1]), int(attrs["width"])

    def body(buffers: list[Any], row: Any) -> None:
        x, out = buffers
        with T.serial(0, ceil_to(width, GROUP) // GROUP) as group:
            numbers = rotated([_sixteen(x, row, group * GROUP + at, columns) for at in range(0, GROUP, LANES)])
            for at, sixteen in enumerate(numbers):
                first = group * GROUP + at * LANES
                if width % GROUP == 0:
                    T.buffer_store(out, sixteen, [row, lanes(first)])
                    continue
                for lane in range(LANES):
                    with T.If(first + lane < width), T.Then():
                        T.buffer_store(out, chosen(sixteen, lane), [row, first + lane])

    return kernel(["float32", "float32"], shapes, body)


def _quantize(numbers: list[Any], row: Any, group: Any, quantized: list[Any]) -> None:
    """Write what quantize_rows gives for two blocks of a row: `numbers` are their 64 columns, float32x16 each.

    What is found of a block or a half, its greatest number or its sum, is found for all of them at once.
    """
    codes, scales, sums, starts = quantized
    blocks = int(scales.shape[1])
    sixteens = [held(sixteen) for sixteen in numbers]
    larger = [T.max(_magnitude(v), _magnitude(w)) for v, w in (sixteens[:2], sixteens[2:])]
    scale, inverse = _scale(greatest_of_two(*larger))
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
    _store_codes(codes, rounded, row, group)


def _quantize_rotated(numbers: list[Any], row: Any, group: Any, quantized: list[Any]) -> None:
    """Write what quantize_rotated gives for the 64 columns of a row that `numbers` are."""
    codes, scales, starts = quantized
    sixteens = rotated(numbers)
    larger = [T.max(_magnitude(v), _magnitude(w)) for v, w in (sixteens[:2], sixteens[2:])]
    scale, inverse = _scale(held(chosen(greatest(T.max(*larger)), *range(TOPS)), "float32", TOPS))
    T.buffer_store(scales, chosen(scale, 0), [row, group])
    factor = held(splat(chosen(inverse, 0)))
    rounded = [held(round_int(v * factor), "int32") for v in sixteens]
    total = (rounded[0] + rounded[1]) + (rounded[2] + rounded[3])
    for width in (8, 4):
        total = T.vectorlow(f"int32x{width}", total) + T.vectorhigh(f"int32x{width}", total)
    total = held(total, "int32", 4)
    own = chosen(total, 0) + chosen(total, 1) + chosen(total, 2) + chosen(total, 3)
    T.buffer_store(starts, own * i32(-MIDDLE), [row, group])
    _store_codes(codes, rounded, row, group)


def store_bf16(sixteen: Any, out: Any, row: Any, column: Any) -> None:
    """Write sixteen columns of a row, float32x16, as pairs, the even column low; ties to even."""
    pairs = T.reinterpret(even_bf16(sixteen), dtype=f"int32x{LANES // 2}")
    T.buffer_store(out, pairs, [row, T.ramp(T.floordiv(column, 2), 1, LANES // 2)])


def _round(numbers: list[Any], row: Any, group: Any, rounded: list[Any]) -> None:
    """Write the pairs that round_rows gives for the 64 columns of a row that `numbers` are."""
    for at, sixteen in enumerate(numbers):
        store_bf16(held(sixteen), rounded[0], row, group * GROUP + at * LANES)


# By what the names of ops end in that give their results so.
INT8 = {
    ENDINGS["quantize_rows"]: Rounding(("int32", "float32", "float32", "int32"), _quantize),
    ENDINGS["quantize_rotated"]: Rounding(("int32", "float32", "int32"), _quantize_rotated),
}
BF16 = Rounding(("int32",), _round)
ROUNDINGS = INT8 | {ENDING: BF16}
KERNELS = {store: INT8[ending].rows for store, ending in ENDINGS.items()}


def _scale(tops: Any) -> tuple[Any, Any]:
    """Scales, and what numbers are multiplied with, of blocks with these greatest magnitudes, TOPS lanes."""
    inverse = T.Select(tops > _of(0.0, TOPS), _of(127.0, TOPS) / tops, _of(0.0, TOPS))
    return held(tops / _of(127.0, TOPS), "float32", TOPS), held(inverse, "float32", TOPS)


def _store_codes(codes: Any, rounded: list[Any], row: Any, group: Any) -> None:
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
