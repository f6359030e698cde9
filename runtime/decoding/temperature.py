"""From logits to weights, and a draw from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def weights(logits: NDArray[Any], temperature: float, most: float | None = None) -> NDArray[np.float64]:
    """exp((logits - most) / temperature) in float64: (n,) -> (n,). `most`: the greatest logit unless given.

    Divided by their sum these are probabilities: https://arxiv.org/abs/1503.02531 Eq. 1.

    >>> weights(np.log([1.0, 4.0]), 2.0).round(2).tolist()
    [0.5, 1.0]
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max() if most is None else most
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, whose exp is 0
        scaled /= temperature
    return np.exp(scaled, out=scaled)


def draw(probabilities: NDArray[np.float64], uniform: float) -> int:
    """The index at which the running sum of (n,) passes `uniform`, a number in [0, 1).

    >>> draw(np.array([0.25, 0.75]), 0.3)
    1
    """
    running = np.cumsum(probabilities)
    return int(np.searchsorted(running, uniform * running[-1], side="right").clip(0, running.size - 1))
