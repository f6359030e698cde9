"""Guesses how a text goes on from where its end has stood before, in itself (prompt lookup) or in other texts.

https://github.com/apoorvumang/prompt-lookup-decoding, LLMA: https://arxiv.org/abs/2304.04487.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_AGREED = 16  # tokens at the end that are compared
_LEAST_AGREED = 2
_BETWEEN = -1  # no token: stands between texts

I32 = NDArray[np.int32]
Guess = tuple[list[int], int]  # tokens, and how many before them agreed; none and 0 where too few did


class Lookup:
    """A text of token ids that grows, and guesses about it."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids = np.empty(0, np.int32)
        self._length = 0
        self.extend(ids)

    def __len__(self) -> int:
        return self._length

    @property
    def end(self) -> I32:
        """The tokens that guesses are made by."""
        return self._ids[max(0, self._length - MOST_AGREED) : self._length]

    def extend(self, ids: Sequence[int]) -> None:
        """The text goes on with these."""
        length = self._length + len(ids)
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._length], np.empty(length + 256, np.int32)])
        self._ids[self._length : length] = ids
        self._length = length

    def guess(self, most: int) -> Guess:
        """The next `most` tokens: what followed the last of those places that agree with most tokens at the end.

        A text that ends before there are enough goes round.

        >>> Lookup([1, 2, 3, 4, 9, 1, 2, 3]).guess(2)
        ([4, 9], 3)
        >>> Lookup([7, 1, 2, 1, 2]).guess(5)
        ([1, 2, 1, 2, 1], 2)
        """
        ids = self._ids[: self._length]
        place, agreed = _best_place(ids[:-1], self.end)
        if not agreed or most < 1:
            return [], 0
        found: list[int] = np.resize(ids[place + 1 :], most).tolist()
        return found, agreed


class Texts:
    """The last texts that were said, `most` tokens of them at most, and guesses by them."""

    def __init__(self, most: int) -> None:
        self._ids = np.empty(0, np.int32)
        self._most = most

    def add(self, ids: Sequence[int]) -> None:
        """One more."""
        self._ids = np.concatenate([self._ids, np.array([*ids, _BETWEEN], np.int32)])[-self._most :]

    def guess(self, end: I32, most: int) -> Guess:
        """What followed such an end, as `Lookup.guess`; fewer tokens where that text ended.

        >>> texts = Texts(100)
        >>> texts.add([5, 6, 7, 8])
        >>> texts.guess(np.array([1, 5, 6], np.int32), 9)
        ([7, 8], 2)
        """
        place, agreed = _best_place(self._ids, end)
        behind = self._ids[place + 1 : place + 1 + most].tolist() if agreed else []
        found = behind[: behind.index(_BETWEEN)] if _BETWEEN in behind else behind
        return (found, agreed) if found else ([], 0)


def _best_place(ids: I32, end: I32) -> tuple[int, int]:
    """The last of the places in `ids` where most tokens up to it are those of `end`, and how many; 0: too few."""
    if not len(end):
        return 0, 0
    places, agreed = np.flatnonzero(ids == end[-1]), 1
    while agreed < len(end):
        earlier = places[places >= agreed]
        earlier = earlier[ids[earlier - agreed] == end[-1 - agreed]]
        if not len(earlier):
            break
        places, agreed = earlier, agreed + 1
    return (int(places[-1]), agreed) if len(places) and agreed >= _LEAST_AGREED else (0, 0)
