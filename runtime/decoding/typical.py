"""Locally typical sampling: the tokens whose surprise is nearest to the expected one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def typical(probabilities: NDArray[np.float64], p: float) -> NDArray[np.int64]:
    """Indices, rising, of the fewest of all probabilities (n,) that reach p, nearest to the entropy first.

    https://arxiv.org/abs/2202.00666 Eq. 8 and 9. Inferflow leaves the first of them out of the sum, so it keeps more;
    it also leaves out the one that reaches p.

    >>> typical(np.array([0.6, 0.2, 0.1, 0.1]), 0.5).tolist()
    [0, 1]
    """
    if p >= 1:
        return np.arange(probabilities.size)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    possible = probabilities > 0
    entropy = float(probabilities[possible] @ surprise[possible])
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
    return np.sort(order[:count])
