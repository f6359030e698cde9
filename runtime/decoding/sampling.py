"""From logits to the next token: greedy, or drawn after temperature, then top-k, then top-p, in that order.

The same order as Hugging Face transformers. Each sequence draws from a generator of its own, so what it says does not
depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import RequestError

_MAX_TEMPERATURE = 1e4
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` None or 0 takes the likeliest token, and the others have no effect.

    temperature: divides the logits; below 1 sharpens. top_k: only the k likeliest tokens; None or 0 for all.
    top_p: only the likeliest tokens that together reach this probability, in (0, 1]; None for all. seed: None for fresh
    randomness. Raises RequestError for values outside these.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, _MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p: got 0, wanted a number above 0, at most 1")
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _whole("seed", self.seed, 0, _MAX_SEED)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return not self.temperature


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = None if sampling.greedy else np.random.Generator(np.random.PCG64(sampling.seed))

    def next_token(self, logits: NDArray[np.float32], argmax: int) -> int:
        """The next token id, from logits (V,) and the index of the greatest of them."""
        if self._random is None:
            return int(argmax)
        ids, probabilities = candidates(logits, self._sampling)
        return int(ids[draw(probabilities, self._random.random())])


def candidates(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids and their probabilities, which sum to 1, after temperature, top-k and top-p; likeliest first."""
    ids = top_k(logits, sampling.top_k or logits.size)
    probabilities = softmax(logits[ids], sampling.temperature or 1.0)
    if sampling.top_p is None or sampling.top_p >= 1:
        return ids, probabilities
    kept = top_p(probabilities, sampling.top_p)
    chosen = probabilities[kept]
    return ids[kept], chosen / chosen.sum()


def softmax(logits: NDArray[Any], temperature: float) -> NDArray[np.float64]:
    """exp(logits / temperature), divided by their sum, in float64: (V,) -> (V,).

    https://arxiv.org/abs/1503.02531 Eq. 1.

    >>> softmax(np.log([1.0, 3.0]), 1.0).round(2).tolist()
    [0.25, 0.75]
    """
    scaled = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, whose exp is 0
        scaled = np.exp((scaled - scaled.max()) / temperature)
    return np.asarray(scaled / scaled.sum())


def top_k(logits: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Indices of the k greatest of (V,); of equal ones the lower index first. All of them, unsorted, when k >= V.

    https://arxiv.org/abs/1805.04833 section 5.4.

    >>> top_k(np.array([1.0, 5.0, 3.0, 5.0]), 2).tolist()
    [1, 3]
    """
    if k >= logits.size:
        return np.arange(logits.size)
    least = np.partition(logits, logits.size - k)[logits.size - k]
    at_least = np.flatnonzero(logits >= least)
    return np.asarray(at_least[np.argsort(-logits[at_least], kind="stable")[:k]])


def top_p(probabilities: NDArray[np.float64], p: float) -> NDArray[np.int64]:
    """Indices of the fewest likeliest of (V,) whose probabilities reach p together, likeliest first; at least one.

    https://arxiv.org/abs/1904.09751 section 3.1.

    >>> top_p(np.array([0.1, 0.6, 0.3]), 0.7).tolist()
    [1, 2]
    """
    # Those below (1 - p) / V hold less than 1 - p together, so none of them is needed: this keeps the sort short.
    worthy = np.flatnonzero(probabilities >= (1 - p) / probabilities.size)
    order = worthy[np.argsort(-probabilities[worthy], kind="stable")]
    reached = np.cumsum(probabilities[order])
    return np.asarray(order[: int(np.searchsorted(reached, p)) + 1])


def draw(probabilities: NDArray[np.float64], uniform: float) -> int:
    """The index at which the running sum of (V,) passes `uniform`, a number in [0, 1).

    >>> draw(np.array([0.25, 0.75]), 0.3)
    1
    """
    running = np.cumsum(probabilities)
    return int(np.searchsorted(running, uniform * running[-1], side="right").clip(0, running.size - 1))


def _number(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    good = isinstance(value, Real) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]  # NaN is in no range
        raise RequestError(f"{name}: got {_shown(value)}, wanted a number in {low:g}..{high:g}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(f"{name}: got {_shown(value)}, wanted a whole number in {low}..{high}")


def _shown(value: object) -> str:
    try:
        return repr(value)[:40]
    except ValueError:  # Python does not write integers of thousands of digits
        return "a huge number"
