"""What is known of query heads after some slots: the greatest score, sums by it; kept, merged in order, divided.

Records of chunks are merged one after another in the order of slots, wherever each was made, by products and sums that
a compiler may not put together otherwise: so the same bits come out (https://arxiv.org/abs/2205.14135 section 3.1).
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, fill, fma, held, local

LOWEST = -3.0e38  # of scores: below all, and a number, so that differences of it are numbers


class Record:
    """Some query heads' greatest scores and sums of weights against these, and a thread's share of the sums of values.

    `owners` says of each of these sums which of the heads it belongs to.
    """

    def __init__(self, owners: list[int]) -> None:
        self.owners, self.heads = owners, max(owners) + 1
        self.tops, self.totals, self.sums = local((self.heads,)), local((self.heads,)), local((len(owners),))

    def clear(self, sinks: list[Any] | None = None) -> None:
        """Nothing seen yet; a sink is a token of a head that was seen before all others, its value zeros."""
        fill(self.sums, f32(0))
        fill(self.totals, f32(0 if sinks is None else 1))
        for head in range(self.heads):
            T.buffer_store(self.tops, f32(LOWEST) if sinks is None else sinks[head], [head])

    def merge(self, other: Record) -> None:
        """Take in another record, of slots that come after those seen so far. One of no slots changes nothing."""
        for head in range(self.heads):
            top = held(T.max(self.tops[head], other.tops[head]))
            mine, new = (held(T.exp(one.tops[head] - top)) for one in (self, other))
            T.buffer_store(self.tops, top, [head])
            T.buffer_store(self.totals, fma(self.totals[head], mine, held(other.totals[head] * new)), [head])
            for at, owner in enumerate(self.owners):
                if owner == head:
                    T.buffer_store(self.sums, fma(self.sums[at], mine, held(other.sums[at] * new)), [at])

    def average(self, at: int) -> Any:
        """One of the sums by all weights."""
        return self.sums[at] / self.totals[self.owners[at]]
