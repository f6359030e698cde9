"""What is known of query heads after some slots: the greatest score, sums by it; kept, merged in order, divided.

A thread has numbers of its own: element `own`, `own + wide`, ... of the sums over the slots of its part. Records of
chunks are merged one after another in the order of slots, wherever each was made, by products and sums that a compiler
may not put together otherwise: so the same bits come out (https://arxiv.org/abs/2205.14135 section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import barrier, f32, fill, fma, held, local, shared

LOWEST = -3.0e38  # of scores: below all, and a number, so that differences of it are numbers


@dataclass(frozen=True)
class Division:
    """How so many threads divide the values of a chunk: by slots into parts, by elements side by side."""

    heads: int  # query heads of the block
    size: int
    threads: int

    @property
    def parts(self) -> int:
        """Parts of a chunk's slots."""
        return max(1, self.threads // self.size)

    @property
    def wide(self) -> int:
        """Elements side by side."""
        return min(self.size, self.threads)

    @property
    def steps(self) -> int:
        """Elements of a thread."""
        return -(-self.size // self.wide)

    @property
    def numbers(self) -> int:
        """Float32 numbers of a record in memory: sums of all threads, totals, greatest scores."""
        return self.heads * (self.steps * self.threads + 2)


class Record:
    """Of the query heads of a block: their greatest scores, sums of weights against these, and sums of values."""

    def __init__(self, division: Division) -> None:
        self.division = division
        self.tops, self.totals = local((division.heads,)), local((division.heads,))
        self.sums = local((division.heads * division.steps,))

    def clear(self, sinks: list[Any] | None = None) -> None:
        """Nothing seen yet; a sink is a token of a head that was seen before all others, its value zeros."""
        fill(self.sums, f32(0))
        fill(self.totals, f32(0 if sinks is None else 1))
        for head in range(self.division.heads):
            T.buffer_store(self.tops, f32(LOWEST) if sinks is None else sinks[head], [head])

    def merge(self, other: Record) -> None:
        """Take in another record, of slots that come after those seen so far."""
        for head in range(self.division.heads):
            top = held(T.max(self.tops[head], other.tops[head]))
            mine, new = (held(T.exp(one.tops[head] - top)) for one in (self, other))
            T.buffer_store(self.tops, top, [head])
            T.buffer_store(self.totals, fma(self.totals[head], mine, held(other.totals[head] * new)), [head])
            for step in range(self.division.steps):
                at = head * self.division.steps + step
                T.buffer_store(self.sums, fma(self.sums[at], mine, held(other.sums[at] * new)), [at])

    def save(self, memory: Any, place: tuple[Any, ...], thread: Any) -> None:
        """Into memory[*place, :]."""
        for index, at in self._sums(thread):
            T.buffer_store(memory, self.sums[index], [*place, at])
        with T.If(thread == 0), T.Then():
            for head, (total, top) in enumerate(self._others()):
                T.buffer_store(memory, self.totals[head], [*place, total])
                T.buffer_store(memory, self.tops[head], [*place, top])

    def load(self, memory: Any, place: tuple[Any, ...], thread: Any) -> None:
        """Out of memory[*place, :]."""
        for index, at in self._sums(thread):
            T.buffer_store(self.sums, memory[place + (at,)], [index])
        for head, (total, top) in enumerate(self._others()):
            T.buffer_store(self.totals, memory[place + (total,)], [head])
            T.buffer_store(self.tops, memory[place + (top,)], [head])

    def _sums(self, thread: Any) -> list[tuple[int, Any]]:
        """(which of the thread's sums, where in memory)."""
        return [(i, i * self.division.threads + thread) for i in range(self.division.heads * self.division.steps)]

    def _others(self) -> list[tuple[int, int]]:
        """(where the total of a head is in memory, where the greatest score)."""
        first = self.division.heads * self.division.steps * self.division.threads
        return [(first + 2 * head, first + 2 * head + 1) for head in range(self.division.heads)]

    def finish(self, out: Any, row: Any, column: Any, thread: Any) -> None:
        """The averages of values into out[row, column:], head after head."""
        division = self.division
        part, own = T.floordiv(thread, division.wide), T.floormod(thread, division.wide)
        partial = shared((division.heads, division.parts, division.wide))
        result = local((1,))
        for j in range(division.steps):
            if j:
                barrier()  # the elements before are written
            with T.If(part < division.parts), T.Then():
                for head in range(division.heads):
                    T.buffer_store(partial, self.sums[head * division.steps + j], [head, part, own])
            barrier()
            with T.If(tirx.all(part == 0, own + j * division.wide < division.size)), T.Then():
                for head in range(division.heads):
                    T.buffer_store(result, f32(0), [0])
                    for other in range(division.parts):
                        T.buffer_store(result, result[0] + partial[head, other, own], [0])
                    at = column + head * division.size + own + j * division.wide
                    T.buffer_store(out, result[0] / self.totals[head], [row, at])
