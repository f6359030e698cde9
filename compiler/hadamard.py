"""The rotation that spreads what is large in a few columns over many: a Hadamard matrix, its own inverse."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def hadamard(x: F32, block: int) -> F32:
    """x (..., D) times a Hadamard matrix over sqrt(block) in blocks of as many columns, a power of 2 that divides D.

    It keeps products of two rows that are both rotated. Sums are made in pairs at distance 1, 2, 4..., so that kernels
    which do likewise have the same bits.
    """
    size, distance = x.shape[-1], 1
    while distance < block:
        pairs = x.reshape(*x.shape[:-1], size // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    return x * np.float32(block**-0.5)
