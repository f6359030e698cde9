"""Guesses how a text goes on from where its end has stood before (prompt lookup).

https://github.com/apoorvumang/prompt-lookup-decoding, LLMA: https://arxiv.org/abs/2304.04487.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_AGREED = 16  # tokens at the end that are compared
_LEAST_AGREED = 2


class Lookup:
    """A text of token ids that grows, and guesses about it."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids = np.empty(0, np.int32)
        self._length = 0
        self.extend(ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Sequence[int]) -> None:
        """The text goes on with these."""
        length = self._length + len(ids)
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._length], np.empty(length + 256, np.int32)])
        self._ids[self._length : length] = ids
        self._length = length

    def guess(self, most: int) -> tuple[list[int], int]:
        """The next `most` tokens, and how many at the end stood before them already; none and 0 where too few did.

        They are what followed the last of those places that agree with the most tokens, `MOST_AGREED` at most. A text
        that ends before there are enough goes round.

        >>> Lookup([1, 2, 3, 4, 9, 1, 2, 3]).guess(2)
        ([4, 9], 3)
        >>> Lookup([7, 1, 2, 1, 2]).guess(5)
        ([1, 2, 1, 2, 1], 2)
        """
        ids = self._ids[: self._length]
        if most < 1 or not len(ids):
            return [], 0
        places, agreed = np.flatnonzero(ids[:-1] == ids[-1]), 1
        while agreed < min(MOST_AGREED, len(ids) - 1):
            earlier = places[places >= agreed]
            earlier = earlier[ids[earlier - agreed] == ids[-1 - agreed]]
            if not len(earlier):
                break
            places, agreed = earlier, agreed + 1
        if not len(places) or agreed < _LEAST_AGREED:
            return [], 0
        behind = ids[places[-1] + 1 :]
        found: list[int] = np.resize(behind, most).tolist()
        return found, agreed
