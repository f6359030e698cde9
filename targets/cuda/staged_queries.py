"""Queries of a warp over a chunk that is in shared memory: 16 of them, a product's rows, in registers.

A lane holds sums of two queries, of the slots whose V it reads (staged_chunk.py). What a query's weights are, and in
which order they are added up, is the same whether a warp has two pages of the chunk or all: of each pair of pages a
lane adds up its own, pairs are added in their order, and then lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.attention_block import EIGHT, HALVES, TILE, K
from llmc.targets.cuda.fragments import COLUMNS, parted
from llmc.targets.cuda.launch import f32, fill, greater, held, local, u32, warp_reduce
from llmc.targets.cuda.prelude import exp2, load_pair, mma
from llmc.targets.cuda.records import LOWEST
from llmc.targets.cuda.scoring import Scoring
from llmc.targets.cuda.sight import Sequence, Sight, held_int
from llmc.targets.cuda.staged_chunk import StagedChunk
from llmc.targets.cuda.target import WARP

PAIR = 2  # pages whose weights are added up first


class StagedQueries:
    """`own` heads, from `first_head` on, of each of TILE // own rows."""

    def __init__(
        self, q: Any, own: int, size: int, scoring: Scoring, first_head: Any, lane: Any, kept: Any = None
    ) -> None:
        """q: (M, H D) float32, or pairs of bfloat16 (M, H D / 2) in uint32.

        `kept`: shared memory, and the first word of the warp's there, where queries stay while registers are dear.
        """
        self.q, self.own, self.size, self.scoring, self.lane = q, own, size, scoring, lane
        self.column, self.quarter = T.floordiv(lane, 4), T.floormod(lane, 4)
        self.queries = [half * EIGHT + self.column for half in range(HALVES)]
        self.heads = [held_int(first_head + T.floormod(query, own)) for query in self.queries]
        self.slopes = [scoring.slope(head) for head in self.heads]
        self.words, self.kept = local((self.steps * COLUMNS,), "uint32"), kept
        self.tops, self.totals = local((HALVES,)), local((HALVES,))
        self.rows = local((HALVES,), "int32")

    @property
    def steps(self) -> int:
        """Products that a score adds up."""
        return self.size // K

    @property
    def count(self) -> int:
        """Rows of a warp."""
        return TILE // self.own

    def look(self, sequence: Sequence, row: Callable[[Any], Any]) -> None:
        """Take queries of this sequence's rows: `row(i)` is that of the warp's i-th, -1 if there is none."""
        self.sequence = sequence
        for half, query in enumerate(self.queries):
            place = held_int(T.floordiv(query, self.own))
            T.buffer_store(self.rows, T.if_then_else(place < self.count, row(place), -1), [half])
        self.sights = [Sight(sequence, self.rows[half]) for half in range(HALVES)]

    def read(self) -> None:
        """The queries themselves, zeros for those of nobody."""
        for half in range(HALVES):
            with T.If(self.rows[half] >= 0):
                with T.Then():
                    for step in range(self.steps):
                        place = self.heads[half] * self.size + step * K + self.quarter * COLUMNS
                        for i, word in enumerate(self._four(self.rows[half], place)):
                            T.buffer_store(self.words, word, [step * COLUMNS + 2 * i + half])
                with T.Else():
                    for at in range(half, self.steps * COLUMNS, HALVES):
                        T.buffer_store(self.words, u32(0), [at])

        if self.kept is not None:
            memory, _ = self.kept
            for step in range(self.steps):
                words = self.words[T.ramp(step * COLUMNS, 1, COLUMNS)]
                T.buffer_store(memory, words, [T.ramp(self._kept(step), 1, COLUMNS)])

    def _kept(self, step: int) -> Any:
        return self.kept[1] + (step * WARP + self.lane) * COLUMNS

    def _four(self, row: Any, place: Any) -> list[Any]:
        if str(self.q.dtype) == "uint32":
            words = local((2,), "uint32")
            load_pair(words[0], self.q[row, T.floordiv(place, 2)])
            return [words[0], words[1]]
        numbers = [self.q[row, place + e] for e in range(COLUMNS)]
        return parted([held(number) for number in numbers], 1)[0]

    def score(self, chunk: StagedChunk, numbers: list[Any], scores: Any) -> None:
        """Products with K of these pages."""
        a, b = local((COLUMNS,), "uint32"), local((4,), "uint32")
        fill(scores, f32(0))
        for step in range(self.steps):
            if self.kept is None:
                a, first = self.words, step * COLUMNS
            else:
                words, first = self.kept[0][T.ramp(self._kept(step), 1, COLUMNS)], 0
                T.buffer_store(a, words, [T.ramp(0, 1, COLUMNS)])
            for p, number in enumerate(numbers):
                chunk.keys(number, step, b)
                for slot in range(2):
                    mma(scores[(2 * p + slot) * 4], a[first], b[2 * slot])

    def _places(self, half: int, pages: Any) -> list[tuple[int, int, int]]:
        """(page, place there, where in `scores`) of the scores that the lane has of one of its queries."""
        return [(p, at, (p * 2 + at // 2) * 4 + half * 2 + at % 2) for p in pages for at in range(4)]

    def _slot(self, begin: Any, p: int, place: int) -> Any:
        return begin + (p * PAGE + place // 2 * EIGHT + place % 2) + self.quarter * 2

    def top(self, scores: Any, begin: Any, pages: int) -> None:
        """Products -> scores of so many pages from slot `begin` on, where queries see; the warp's greatest."""
        for half, (head, slope) in enumerate(zip(self.heads, self.slopes, strict=True)):
            sight = self.sights[half]
            for p, place, at in self._places(half, range(pages)):
                slot = self._slot(begin, p, place)
                score = self.scoring.score(scores[at], head, slope, sight.place(slot))
                T.buffer_store(scores, score, [at])
        self._hide(scores, begin, pages)
        for half in range(HALVES):
            T.buffer_store(self.tops, f32(LOWEST), [half])
            for _, _, at in self._places(half, range(pages)):
                T.buffer_store(self.tops, T.max(self.tops[half], scores[at]), [half])
            warp_reduce(self.tops, half, greater, lanes=4)

    def _hide(self, scores: Any, begin: Any, pages: int) -> None:
        """Scores of what queries do not see -> LOWEST."""
        with T.If(tirx.Not(self._sees_all(begin, pages))), T.Then():
            for half, sight in enumerate(self.sights):
                for p, place, at in self._places(half, range(pages)):
                    seen = sight.sees(self._slot(begin, p, place))
                    T.buffer_store(scores, T.Select(seen, scores[at], f32(LOWEST)), [at])

    def _sees_all(self, begin: Any, pages: int) -> Any:
        """Whether both queries of the lane see all of so many pages."""
        last = begin + (pages * PAGE - 1)
        seen = [sight.end >= last for sight in self.sights]
        if self.sequence.places.window:
            seen += [sight.begin <= begin for sight in self.sights]
        if self.sequence.hole:
            seen.append(tirx.any(last < self.sequence.hole[0], begin >= self.sequence.hole[1]))
        return tirx.all(*seen)

    def weigh(self, scores: Any, pages: int) -> list[list[Any]]:
        """Scores -> weights by `tops`; of each query the lane's sums, of each pair of pages."""
        sums = local((HALVES * pages // PAIR,))
        for half in range(HALVES):
            # What sees nothing of the chunk has weights of 0, not of LOWEST less LOWEST.
            top = held(T.Select(self.tops[half] > f32(LOWEST), self.tops[half], f32(0)))
            for pair in range(pages // PAIR):
                to = half * (pages // PAIR) + pair
                T.buffer_store(sums, f32(0), [to])
                for _, _, at in self._places(half, range(pair * PAIR, (pair + 1) * PAIR)):
                    T.buffer_store(scores, exp2(scores[at] - top), [at])
                    T.buffer_store(sums, sums[to] + scores[at], [to])
        return [[sums[half * (pages // PAIR) + pair] for pair in range(pages // PAIR)] for half in range(HALVES)]

    def weights(self, scores: Any, p: int) -> list[Any]:
        """Of a page, words of a product: of two slots of both queries, and of two more; in one bfloat16 each, for V is
        off by as much."""
        both = [parted([scores[at] for _, _, at in self._places(half, [p])], 1)[0] for half in range(HALVES)]
        return [both[word % 2][word // 2] for word in range(COLUMNS)]
