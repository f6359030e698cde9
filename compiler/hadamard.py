"""The rotation that spreads what is large in a few columns over many: a Hadamard matrix, its own inverse."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
_PIECE = 1 << 14  # numbers that are worked on at once: with what is made of them they stay in a CPU's caches


def hadamard(x: F32, block: int) -> F32:
    """x (..., D) times a Hadamard matrix over sqrt(block) in blocks of as many columns, a power of 2 that divides D.

    It keeps products of two rows that are both rotated. Sums are made in pairs at distance 1, 2, 4..., so that kernels
    which do likewise have the same bits.
    """
    out = np.empty(x.shape, np.float32)
    blocks, rotated = x.reshape(-1, block), out.reshape(-1, block)
    step = max(1, _PIECE // block)
    for first in range(0, len(blocks), step):
        rotated[first : first + step] = _rotated(np.array(blocks[first : first + step].T, order="C")).T
    return out


def _rotated(x: F32) -> F32:
    """(block, n), a copy that is written over: columns are rotated, so that whole rows are added to one another."""
    block, distance, other = len(x), 1, np.empty_like(x)
    while distance < block:
        pairs = x.reshape(block // (2 * distance), 2, distance, -1)
        sums = other.reshape(pairs.shape)
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        x, other = other, x
        distance *= 2
    x *= np.float32(block**-0.5)
    return x
