"""Activations as int8: the left side of a block format's linear layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats.plain import F32, ceil_to

BLOCK = 32  # columns of activations that share a scale
SUM_BLOCK = 16  # columns of the finer sums: the smallest block of weights
GROUP = 64  # columns are padded to a multiple of this; longer records only hold widths that fill them


def quantize_rows(x: F32) -> tuple[NDArray[np.int8], F32, F32]:
    """x (M, K) -> int8 codes (M, P), scales (M, P / 32), scale * sums of codes (M, 3 P / 32), P = K padded to 64.

    The sums are those of every 32 columns, then of every 16: the least block of weights with an offset of its own.
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
    parts = [
        codes.reshape(rows, -1, size).sum(-1, dtype=np.int32).astype(np.float32)
        * np.repeat(scale, BLOCK // size, axis=1)
        for size in (BLOCK, SUM_BLOCK)
    ]
    return codes.reshape(rows, -1), scale, np.concatenate(parts, axis=1)
