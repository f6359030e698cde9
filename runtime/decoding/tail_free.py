"""Tail-free sampling: the tokens before the curve of sorted probabilities has become flat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def tail_free(probabilities: NDArray[np.float64], z: float) -> int:
    """How many of all sorted probabilities (n,) come before the tail.

    The bends of the curve, its second differences, are summed from the first on, as shares of their sum; the tail
    begins with the token where the sum passes z. A bend belongs to the middle one of the three tokens that make it, so
    the first token always stays. https://www.trentonbricken.com/Tail-Free-Sampling/

    Inferflow never counts the first bend, so its tail begins later.

    >>> tail_free(np.array([0.5, 0.3, 0.14, 0.04, 0.02]), 0.6)
    3
    """
    if z >= 1 or probabilities.size < 3:
        return probabilities.size
    bends = np.abs(np.diff(probabilities, 2))
    if bends.sum() == 0:
        return probabilities.size
    passed = np.flatnonzero(np.cumsum(bends) > z * bends.sum())
    return int(passed[0]) + 1 if passed.size else probabilities.size
