"""What the ops of latent attention mean, in NumPy: slow, obvious, float32.

Letters: M rows, H heads, K / N input / output width of a head's matrix, S columns of x that a head has, L size of the
latent, P rotated numbers of a head. Matrices of heads lie one under another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats import FORMATS, dequantize_rows, from_bf16

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def head_linear(x: F32, weight: F32, heads: int) -> F32:
    """(M, H S), (H N, K), K <= S -> (M, H N)."""
    columns = weight.shape[1]
    slices = x.reshape(len(x), heads, -1)[:, :, :columns]
    y = np.einsum("mhk,hnk->mhn", slices, weight.reshape(heads, -1, columns))
    return np.ascontiguousarray(y.reshape(len(x), -1), np.float32)


def latent_rows(q: F32, rotated: F32, latent: F32, heads: int) -> F32:
    """(M, H L), (M, (H + 1) P), (M, L) -> (M, (H + 2) (L + P))."""
    rows, size = latent.shape
    turned = rotated.reshape(rows, heads + 1, -1)
    whole = np.zeros((rows, heads + 2, size + turned.shape[2]), np.float32)
    whole[:, :heads, :size] = q.reshape(rows, heads, size)
    whole[:, heads:, :size] = latent[:, None]
    whole[:, : heads + 1, size:] = turned
    return whole.reshape(rows, -1)


def packed_head_linear(x: F32, weight: NDArray[Any], format: str, heads: int, columns: int, width: int) -> F32:
    """(M, H S), packed (H N = width, K = columns) -> (M, H N)."""
    return head_linear(x, FORMATS[format].stored(weight, width, columns), heads)


def bf16_head_linear(x: I32, weight: NDArray[Any], format: str, heads: int, columns: int, width: int) -> F32:
    """bfloat16 pairs (M, H S / 2), packed (H N, K) -> (M, H N)."""
    rounded = from_bf16(np.ascontiguousarray(x).view(np.uint16))
    return packed_head_linear(rounded, weight, format, heads, columns, width)


def i8_head_linear(
    codes: I32, scales: F32, totals: NDArray[Any], weight: NDArray[Any],
    format: str, heads: int, columns: int, width: int,
) -> F32:  # fmt: skip
    """codes * scales (M, H S), packed (H N, K) -> (M, H N); `totals` save the kernel the offset's work."""
    return packed_head_linear(dequantize_rows(codes, scales), weight, format, heads, columns, width)
