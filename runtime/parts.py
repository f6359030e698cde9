"""The step in parts: some rows go through all layers, others through a part of the layers in each step.

So the rows of a long prompt can stay together: each layer's weights are read once for all of them, and the answers
beside them wait for one part's work at a time (https://arxiv.org/abs/2510.08055). A row computes the same bits as in
the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.index_arrays import aligned

if TYPE_CHECKING:
    from llmc.runtime.runner import Feed

F32 = NDArray[np.float32]
ArraysOf = Callable[[SequenceOf[int]], list[NDArray[np.int32]]]  # numbers of feeds -> a step's arrays of these alone


@dataclass
class Passage:
    """`rows` tokens on their way through the layers: `left` parts lie ahead of them; x (rows, C): what they are now.

    Their keys and values of the layers behind them are in pages that their sequence holds, but it is not longer yet.
    """

    rows: int
    left: int
    x: F32 | None = None  # None before the first part


@dataclass(frozen=True)
class Parts:
    """The compiled functions. x is (M, C) float32; places are a step's arrays without tokens and logit_rows.

    embed(tokens, positions) -> x; each of `parts`, in order: (x, *places) -> x; head(x, logit_rows) -> as the step.
    """

    embed: Callable[..., F32]
    parts: tuple[Callable[..., F32], ...]
    head: Callable[..., list[NDArray[Any]]]

    @property
    def count(self) -> int:
        """Parts that the layers were cut into."""
        return len(self.parts)

    def step(self, batch: SequenceOf[Feed], arrays_of: ArraysOf) -> list[NDArray[Any]]:
        """What the step gives for the rows that want logits and are through; no arrays where there are none.

        The passages move when all is done: after an error they are where they were.
        """
        spans = [self._span(feed) for feed in batch]
        rows = _Rows(batch)
        entering = [number for number, span in enumerate(spans) if span.start == 0]
        if entering:
            tokens, positions, *_ = arrays_of(entering)
            rows.put(entering, self.embed(tokens, positions))
        before: list[int] = []
        for part, function in enumerate(self.parts):
            here = [number for number, span in enumerate(spans) if part in span]
            if here != before and here:
                places = arrays_of(here)[1:-1]
            if here:
                rows.put(here, function(rows.together(here), *places))
            before = here
        wanting = [n for n, feed in enumerate(batch) if feed.logits != "none" and spans[n].stop == self.count]
        found = list(self.head(rows.together(wanting), arrays_of(wanting)[-1])) if wanting else []
        for number, (feed, span) in enumerate(zip(batch, spans, strict=True)):
            if feed.passage is not None:
                feed.passage.left = self.count - span.stop
                feed.passage.x = rows.apart[number] if feed.passage.left else None
        return found

    def _span(self, feed: Feed) -> range:
        """The parts that a feed goes through."""
        if feed.passage is None:
            return range(self.count)
        first = self.count - feed.passage.left
        return range(first, first + feed.through)


class _Rows:
    """What the rows of each feed are now, `apart`, and those that went through a function last together."""

    def __init__(self, batch: SequenceOf[Feed]) -> None:
        self._counts = [len(feed.ids) for feed in batch]
        self.apart = [None if feed.passage is None else feed.passage.x for feed in batch]
        self._members: list[int] = []
        self._x: F32 | None = None

    def put(self, members: list[int], x: F32) -> None:
        """x has the rows of `members`, one after another."""
        self._members, self._x = members, x
        first = 0
        for number in members:
            self.apart[number] = x[first : first + self._counts[number]]
            first += self._counts[number]

    def together(self, members: list[int]) -> F32:
        """The rows of `members`, one after another, from a multiple of 64 bytes on."""
        if self._x is not None and members == self._members:
            return self._x
        parts = [x for number in members if (x := self.apart[number]) is not None]
        count, width = sum(map(len, parts)), parts[0].shape[1]
        (memory,) = aligned([count * width])
        return np.concatenate(parts, out=memory.view(np.float32).reshape(count, width))
