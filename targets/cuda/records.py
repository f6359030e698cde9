"""What is known of query heads after some slots: the greatest score, sums by it; kept, merged in order, divided.

Scores are logarithms to base 2 of weights (targets/cuda/scoring.py).

Records of chunks are merged one after another in the order of slots, wherever each was made, by products and sums that
a compiler may not put together otherwise: so the same bits come out (https://arxiv.org/abs/2205.14135 section 3.1).
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, fill, fma, held, local
from llmc.targets.cuda.prelude import exp2

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
        factors = self.meet(other)
        for at in range(len(self.owners)):
            self.take(at, other.sums[at], factors)

    def meet(self, other: Record) -> list[tuple[Any, Any]]:
        """Take in all but the sums: by what a head's own sums are multiplied now, and by what the other's are."""
        factors = []
        for head in range(self.heads):
            top = held(T.max(self.tops[head], other.tops[head]))
            mine, new = (held(exp2(one.tops[head] - top)) for one in (self, other))
            T.buffer_store(self.tops, top, [head])
            T.buffer_store(self.totals, fma(self.totals[head], mine, held(other.totals[head] * new)), [head])
            factors.append((mine, new))
        return factors

    def take(self, at: int, other: Any, factors: list[tuple[Any, Any]]) -> None:
        """Take in one of the sums."""
        mine, new = factors[self.owners[at]]
        T.buffer_store(self.sums, fma(self.sums[at], mine, held(other * new)), [at])

    def finish(self) -> None:
        """Nothing is taken in any more: totals are what averages are multiplied by."""
        for head in range(self.heads):
            T.buffer_store(self.totals, f32(1) / self.totals[head], [head])

    def average(self, at: int) -> Any:
        """One of the sums by all weights."""
        return self.sums[at] * self.totals[self.owners[at]]
