"""Row-wise kernels that round activations: to bfloat16, or to int8 blocks with their scales and sums."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, GROUP, SUM_BLOCK, ceil_to
from llmc.targets.rows import kernel
from llmc.targets.target import Target
from llmc.targets.vector import LANES, f32, held, i32, lanes, reduce_max, registers, round_bf16, round_int, splat


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
            staged, top = registers((BLOCK,), "float32"), registers((1,), "float32")
            T.buffer_store(top, _absmax_block(x, row, block * BLOCK, width, staged), [0])
            scale, inverse = registers((1,), "float32"), registers((1,), "float32")
            T.buffer_store(inverse, T.Select(top[0] > f32(0), f32(127) / top[0], f32(0)), [0])
            T.buffer_store(scale, top[0] / f32(127), [0])
            T.buffer_store(scales, scale[0], [row, block])
            halves = registers((BLOCK // SUM_BLOCK,), "int32")
            for half in range(BLOCK // LANES):
                whole = held(round_int(staged[lanes(half * LANES)] * splat(inverse[0])), "int32")
                packed = T.reinterpret(T.cast(whole, "int8x16"), dtype="int32x4")
                T.buffer_store(codes, packed, [row, T.ramp(block * (BLOCK // 4) + half * 4, 1, 4)])
                T.buffer_store(halves, T.call_llvm_pure_intrin("llvm.vector.reduce.add", whole, dtype="int32"), [half])
            places = [block, blocks + block * 2, blocks + block * 2 + 1]  # sums of 32, then those of 16
            for total, place in zip([halves[0] + halves[1], halves[0], halves[1]], places, strict=True):
                T.buffer_store(sums, T.cast(total, "float32") * scale[0], [row, place])

    return kernel(["float32", "int32", "float32", "float32"], shapes, body)
