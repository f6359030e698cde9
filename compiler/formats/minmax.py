"""The lead seed's quantizers: a block's codes are evenly spaced between its least and its greatest weight.

    scale = (max - min) / top,  code = round((w - min) / scale),  w' = scale * code + min        (Inferflow Eq. 1-5)

with top = 2^k - 1, or 10 for the 3.5-bit pairs of 11 levels. Scale and minimum are rounded to float16 before the
codes are chosen, so a code is the nearest one on the grid that is stored.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats.block import U8, BlockFormat, Quantized, blocks_of, join, over_block, scales
from llmc.compiler.formats.plain import F32, Array, pieces
from llmc.compiler.formats.search import TOP

LEVELS = 11  # of a weight in a pair code: 11 * 11 = 121 codes in 7 bits


def pair_grid() -> U8:
    """(121, 2): code a + 11 b stands for (a, b)."""
    code = np.arange(LEVELS * LEVELS)
    return np.stack([code % LEVELS, code // LEVELS], axis=1).astype(np.uint8)


def minmax(weight: F32, format: BlockFormat, importance: F32 | None = None) -> Quantized:
    """Formats with a float16 scale and minimum. Every error counts alike: `importance` is not used."""
    return join([_minmax(weight[piece], format) for piece in pieces(*weight.shape)])


def _minmax(weight: F32, format: BlockFormat) -> Quantized:
    blocks = blocks_of(weight, format)
    steps = LEVELS - 1 if format.pair else format.top
    low = over_block(np.minimum, blocks)
    scale = _fp16((over_block(np.maximum, blocks) - low) / np.float32(steps), "block scale")
    minimum = _fp16(low, "block minimum")
    codes = _nearest(blocks, scale.astype(np.float32), minimum.astype(np.float32), steps).reshape(len(weight), -1)
    if format.pair:
        halves = codes.reshape(len(weight), -1, 2, 4)
        codes = (halves[:, :, 0] + np.uint8(LEVELS) * halves[:, :, 1]).reshape(len(weight), -1)
    return Quantized(codes, {"scale": scale, "minimum": minimum})


def absmax(weight: F32, format: BlockFormat, importance: F32 | None = None) -> Quantized:
    """Formats with a fixed zero point Z: scale = max|w| / (Z - 1) (GGUF's Q8_0), float16 or relative to the row's."""
    return join([_absmax(weight[piece], format) for piece in pieces(*weight.shape)])


def _absmax(weight: F32, format: BlockFormat) -> Quantized:
    blocks = blocks_of(weight, format)
    zero = np.float32(format.offset)
    least = over_block(np.maximum, np.abs(blocks)) / (zero - 1)
    tables: dict[str, Array] = {}
    if format.scale == "row":
        tables = _row_scales(least)
    else:
        tables["scale"] = _fp16(least, "block scale")
    wide, _ = scales(format, tables)
    codes = _nearest(blocks, wide, -zero * wide, format.top)
    return Quantized(codes.reshape(len(weight), -1), tables)


def _row_scales(least: F32) -> dict[str, Array]:
    """Tables of scales (N, B) that are as great as `least`, or up to two steps of a sub-scale greater."""
    row = least.max(1) / np.float32(TOP * TOP)
    steps = np.sqrt(least / np.where(row > 0, row, np.float32(1))[:, None])
    return {"row_scale": row, "sub_scale": np.clip(np.ceil(steps), 0, TOP).astype(np.int8)}


def _nearest(blocks: F32, scale: F32, minimum: F32, top: int) -> U8:
    safe = np.where(scale == 0, np.float32(1), scale)[..., None]
    codes = blocks - minimum[..., None]
    codes /= safe
    return np.clip(np.rint(codes, out=codes), 0, top, out=codes).astype(np.uint8)


def _fp16(values: F32, what: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    limit = float(np.finfo(np.float16).max)
    if values.size and float(np.abs(values).max()) > limit:
        raise LlmcError(
            f"weights too large for a {what} in fp16: got {np.abs(values).max():g}, wanted at most {limit:g}; "
            "use --quant f32 or bf16"
        )
    return values.astype(np.float16)
