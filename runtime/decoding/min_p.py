"""Min-p: the tokens that are not much less likely than the likeliest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def min_p(probabilities: NDArray[np.float64], p: float) -> int:
    """How many of the sorted probabilities (n,), from the first, are at least p times the first.

    https://arxiv.org/abs/2407.01082 section 3.1.

    >>> min_p(np.array([0.5, 0.25, 0.2, 0.05]), 0.4)
    3
    """
    return int(np.searchsorted(-probabilities, -p * probabilities[0], side="right"))
