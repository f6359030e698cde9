"""Mirostat 2: cuts off surprising tokens so that the surprise of the text stays near a target."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def mirostat(probabilities: NDArray[np.float64], mu: float) -> int:
    """How many of the sorted probabilities (n,) have a surprise of at most mu bits; at least one.

    https://arxiv.org/abs/2007.14966 section 4, and version 2 at https://github.com/basusourya/mirostat.

    >>> mirostat(np.array([0.5, 0.25, 0.125, 0.125]), 2.0)
    2
    """
    with np.errstate(divide="ignore"):
        surprise = -np.log2(probabilities)
    return max(1, int(np.searchsorted(surprise, mu, side="right")))


def next_mu(mu: float, probability: float, tau: float, eta: float) -> float:
    """mu after a token that had this probability before the cut.

    So says the paper, where tau is the surprise by the model; Inferflow takes the probability after the cut, which is
    higher, and so lets more through.

    >>> next_mu(10.0, 0.125, 5.0, 0.1)
    10.2
    """
    return mu - eta * (-math.log2(probability) - tau)
