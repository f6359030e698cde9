"""Frustratingly simple decoding: the likeliest token, less what an n-gram model of the text so far says of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_ALL = -1  # no token: the count of all tokens after a context


class AntiModel:
    """Counts the n-grams of a text up to order n."""

    def __init__(self, n: int, text: Iterable[int] = ()) -> None:
        self._counts: list[dict[tuple[int, ...], dict[int, int]]] = [{} for _ in range(n)]  # by length of the context
        self._last: deque[int] = deque(maxlen=max(1, n - 1))
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        """Go on with this token."""
        for length, counts in enumerate(self._counts):
            context = self._context(length)
            if context is not None:
                after = counts.setdefault(context, {_ALL: 0})
                after[_ALL] += 1
                after[token] = after.get(token, 0) + 1
        self._last.append(token)

    def score(self, token: int, beta: float) -> float:
        """How much the text so far speaks for this token: n-gram models, the longest context first, backing off.

        A context that `token` never followed is skipped; each that it did has the share beta of what is left, and the
        one without context all of it. A context's count is smoothed by one. https://arxiv.org/abs/2305.12675 section 3.
        """
        left, score = 1.0, 0.0
        for length in range(len(self._counts) - 1, 0, -1):
            after = self._counts[length].get(self._context(length) or (), {})
            if token in after:
                score += left * beta * after[token] / (after[_ALL] + 1)
                left -= left * beta
        alone = self._counts[0].get((), {})
        return score + left * alone[token] / alone[_ALL] if token in alone else score

    def _context(self, length: int) -> tuple[int, ...] | None:
        """The last `length` tokens, or None if there are not so many."""
        if len(self._last) < length:
            return None
        return tuple(self._last)[len(self._last) - length :]


def fsd(probabilities: NDArray[np.float64], scores: NDArray[np.float64], alpha: float) -> int:
    """The index with the greatest (1 - alpha) * probability - alpha * score; the first of equal ones.

    https://arxiv.org/abs/2305.12675 Eq. 1, with the weights of Inferflow.

    >>> fsd(np.array([0.5, 0.4]), np.array([0.3, 0.1]), 0.5)
    1
    """
    return int(np.argmax((1 - alpha) * probabilities - alpha * scores))
