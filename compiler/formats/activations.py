"""Activations as int8: the left side of a block format's linear layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats.plain import F32, ceil_to

BLOCK = 32  # columns of activations that share a scale
SUM_BLOCK = 16  # columns of the finer sums: the smallest block of weights
MIDDLE = 128  # the byte that stands for a weight of zero where dots begin with `starts`
GROUP = 64  # columns are padded to a multiple of this; longer records only hold widths that fill them


def quantize_rows(x: F32) -> tuple[NDArray[np.int8], F32, F32, NDArray[np.int32]]:
    """x (M, K) -> int8 codes (M, P), scales (M, P / 32), sums and starts (M, 3 P / 32), P = K padded to 64.

    Of the codes of every 32 columns, then of every 16, which is the least block of weights with an offset of its own:
    sums are those times the scale, starts those times -128 (MIDDLE): where the dot with weights u8 begins that stand
    for u8 - 128. A format reads one of them: starts where its offset is a whole number.
    x is about scale * code with scale = max|x| / 127 of each block of 32 (as llama.cpp's Q8_1 activations).
    """
    rows, columns = x.shape
    padded = np.zeros((rows, ceil_to(columns, GROUP)), np.float32)
    padded[:, :columns] = x
    blocks = padded.reshape(rows, -1, BLOCK)
    top = np.abs(blocks).max(-1)
    scale = (top / np.float32(127)).astype(np.float32)
    inverse = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0).astype(np.float32)
    codes = np.rint(blocks * inverse[..., None]).astype(np.int8)
    sizes = (BLOCK, SUM_BLOCK)
    totals = np.concatenate([codes.reshape(rows, -1, size).sum(-1, dtype=np.int32) for size in sizes], axis=1)
    scales = np.concatenate([np.repeat(scale, BLOCK // size, axis=1) for size in sizes], axis=1)
    return codes.reshape(rows, -1), scale, totals.astype(np.float32) * scales, -MIDDLE * totals
