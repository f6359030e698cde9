"""Activations as int8: the left side of a block format's linear layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats.plain import F32, ceil_to
from llmc.compiler.hadamard import hadamard

BLOCK = 32  # columns of activations that share a scale
SUM_BLOCK = 16  # columns of the finer sums: the smallest block of weights
MIDDLE = 128  # the byte that stands for a weight of zero where dots begin with `starts`
GROUP = 64  # columns are padded to a multiple of this; longer records only hold widths that fill them
# Rotated formats: columns that are rotated together, and share a scale.
ROTATED = GROUP


def quantize_rows(x: F32) -> tuple[NDArray[np.int8], F32, F32, NDArray[np.int32]]:
    """x (M, K) -> int8 codes (M, P), scales (M, P / 32), sums and starts (M, 3 P / 32), P = K padded to 64.

    Of the codes of every 32 columns, then of every 16, which is the least block of weights with an offset of its own:
    sums are those times the scale, starts those times -128 (MIDDLE): where the dot with weights u8 begins that stand
    for u8 - 128. A format reads one of them: starts where its offset is a whole number.
    x is about scale * code with scale = max|x| / 127 of each block of 32 (as llama.cpp's Q8_1 activations).
    """
    blocks = _grouped(x).reshape(len(x), -1, BLOCK)
    codes, scale = _rounded(blocks)
    sizes = (BLOCK, SUM_BLOCK)
    totals = np.concatenate([codes.reshape(len(x), -1, size).sum(-1, dtype=np.int32) for size in sizes], axis=1)
    scales = np.concatenate([np.repeat(scale, BLOCK // size, axis=1) for size in sizes], axis=1)
    return codes.reshape(len(x), -1), scale, totals.astype(np.float32) * scales, -MIDDLE * totals


def quantize_rotated(x: F32) -> tuple[NDArray[np.int8], F32, NDArray[np.int32]]:
    """x (M, K) -> int8 codes (M, P), scales and starts (M, P / 64) of `rotate_rows` of it: left of a rotated format."""
    codes, scale = _rounded(rotate_rows(x).reshape(len(x), -1, ROTATED))
    return codes.reshape(len(x), -1), scale, -MIDDLE * codes.sum(-1, dtype=np.int32)


def rotate_rows(x: F32) -> F32:
    """x (M, K) -> (M, P), every 64 columns rotated. Twice is no rotation.

    A number that is large spreads over all of them, so that one scale serves them (https://arxiv.org/abs/2404.00456).
    """
    return hadamard(_grouped(x), ROTATED)


def dequantize_rows(codes: NDArray[np.int32], scales: F32) -> F32:
    """What int8 rows stand for: codes (M, P / 4) in words and a scale for each of as many columns -> (M, P)."""
    blocks = np.ascontiguousarray(codes).view(np.int8).reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).reshape(len(codes), -1)


def _grouped(x: F32) -> F32:
    """x (M, K) with zeros added: (M, P)."""
    padded = np.zeros((len(x), ceil_to(x.shape[1], GROUP)), np.float32)
    padded[:, : x.shape[1]] = x
    return padded


def _rounded(blocks: F32) -> tuple[NDArray[np.int8], F32]:
    """(M, B, columns) -> codes (M, B, columns), scales (M, B)."""
    top = np.abs(blocks).max(-1)
    scale = (top / np.float32(127)).astype(np.float32)
    inverse = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0).astype(np.float32)
    return np.rint(blocks * inverse[..., None]).astype(np.int8), scale
