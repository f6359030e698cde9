"""Top-k: the k likeliest tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def top_k(logits: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Indices of the k greatest of (V,), best first; of equal ones the lower index first.

    https://arxiv.org/abs/1805.04833 section 5.4.

    >>> top_k(np.array([1.0, 5.0, 3.0, 5.0]), 2).tolist()
    [1, 3]
    """
    if k < logits.size:
        least = np.partition(logits, logits.size - k)[logits.size - k]
        within = np.flatnonzero(logits >= least)
    else:
        within = np.arange(logits.size)
    return np.asarray(within[np.argsort(-logits[within], kind="stable")[:k]])
