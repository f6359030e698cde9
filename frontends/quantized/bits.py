"""Whole numbers of a few bits, one behind another: the first in the lowest bits of the first byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def unpack(raw: U8, bits: int, count: int) -> U8:
    """The first `count` numbers of `bits` bits, at most 8, of each row of bytes: (R, bytes) -> (R, count).

    >>> unpack(np.array([[0b11_010_001, 0b0000_0001]], np.uint8), 3, 3).tolist()
    [[1, 2, 7]]
    """
    if bits == 8:
        return raw[:, :count]
    if bits in (1, 2, 4):
        mask = np.uint8((1 << bits) - 1)
        held = [(raw >> np.uint8(at)) & mask for at in range(0, 8, bits)]
        return np.stack(held, axis=2).reshape(len(raw), raw.shape[1] * len(held))[:, :count]
    streams = -(-raw.shape[1] // bits)  # eight numbers take `bits` bytes
    padded = np.zeros((len(raw), streams * bits), np.uint8)
    padded[:, : raw.shape[1]] = raw
    groups = padded.reshape(len(raw), streams, bits).astype(np.uint64)
    words = sum(groups[:, :, byte] << np.uint64(8 * byte) for byte in range(bits))
    mask = np.uint64((1 << bits) - 1)
    held = [((words >> np.uint64(bits * place)) & mask).astype(np.uint8) for place in range(8)]
    return np.stack(held, axis=2).reshape(len(raw), 8 * streams)[:, :count]
