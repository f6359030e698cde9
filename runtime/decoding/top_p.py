"""Top-p, also called nucleus sampling: the fewest likeliest tokens that together reach a probability."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def top_p(probabilities: NDArray[np.float64], p: float) -> int:
    """How many of the sorted probabilities (n,), from the first, reach p together; n + 1 if they do not.

    https://arxiv.org/abs/1904.09751 section 3.1.

    >>> top_p(np.array([0.6, 0.3, 0.1]), 0.7)
    2
    """
    if p >= 1:
        return probabilities.size + 1
    return int(np.searchsorted(np.cumsum(probabilities), p)) + 1
