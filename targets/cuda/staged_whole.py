"""Rows of sequences that have many in a step, over all of their text, K and V through shared memory: prefill.

Each warp of a block has 16 queries of its own. All read the same chunk, of which each has copied two pages: V is on
its way while queries are scored, K of the next chunk while V is added up (https://arxiv.org/abs/2307.08691). Weights
stay in the registers of the lanes that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.attention_block import EIGHT, HALVES, THREADS, TILE, WARPS
from llmc.targets.cuda.finding import FEW
from llmc.targets.cuda.fragments import COLUMNS
from llmc.targets.cuda.launch import (
    added,
    barrier,
    bf16_pair,
    f32,
    fill,
    greater,
    held,
    i32,
    local,
    shared,
    strided,
    warp_reduce,
)  # fmt: skip
from llmc.targets.cuda.prelude import after_launches, bits_set, commit_copies, mma, sync_warp, votes, wait_copies
from llmc.targets.cuda.records import Record
from llmc.targets.cuda.sight import CHUNK, Counting, Places, Sequence, Sight, chunks_between, held_int
from llmc.targets.cuda.staged_chunk import KEYS, PAGES, TURNS, VALUES, StagedChunk
from llmc.targets.cuda.staged_queries import PAIR, StagedQueries
from llmc.targets.cuda.target import WARP


class StagedWhole:
    """Some rows of a step; the block's threads, of which all do the same."""

    def __init__(self, queries: StagedQueries, chunk: StagedChunk, places: Places, thread: Any) -> None:
        self.queries, self.staged, self.places, self.thread = queries, chunk, places, thread
        self.warp, self.lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        self.count = rows_of_block(queries.own)
        self.eights = queries.size // EIGHT
        self.seqs, self.many = shared((self.count,), "int32"), shared((self.count,), "int32")
        self.scores = local((PAGES * 2 * 4,))
        self.values = [chunk.value_place(eight) for eight in range(TURNS)]

    def emit(self, block: Any, out: Any, place: Callable[[Any, Any, Any], list[Any]]) -> None:
        """Rows of the block's, one sequence after another; `place`: row, head of the block's, element -> in `out`."""
        self.begin = held_int(block * self.count)
        self._look()
        after_launches()
        queries, total = self.queries, Record([at % 4 // 2 for at in range(self.eights * 4)])
        with T.serial(0, self.count, unroll=False) as first, T.If(self.many[first] > FEW), T.Then():
            seq = held_int(self.seqs[first])
            sequence = Sequence(self.places, seq, Counting(self.thread, THREADS))

            def row(i: Any) -> Any:
                return T.Select(self.seqs[i] == seq, self.begin + i, i32(-1))

            queries.look(sequence, lambda i: row(self.warp * queries.count + i))
            queries.read()
            self._range(sequence, row)
            sinks = queries.scoring.sinks
            total.clear(None if sinks is None else [queries.scoring.sink(head) for head in queries.heads])
            self._chunks(sequence, total)
            self._save(total, out, place)

    def _look(self) -> None:
        """Of each row of the block the sequence; if it is the first one of that here, how many it has in the step."""
        places, rows = self.places, held_int(self.places.seqs.shape[0])

        def one(i: Any) -> None:
            there = self.begin + i < rows
            T.buffer_store(self.seqs, T.if_then_else(there, places.seqs[T.min(self.begin + i, rows - 1)], -1), [i])

        strided(self.count, self.thread, THREADS, one)
        barrier()
        found = local((2,), "int32")

        def count(i: Any) -> None:
            fill(found, i32(0))
            with T.serial(0, self.count, unroll=8 if self.count % 8 == 0 else None) as other:
                same = self.seqs[other] == self.seqs[i]
                T.buffer_store(found, found[0] + T.Select(same, i32(1), i32(0)), [0])
                T.buffer_store(found, T.Select(tirx.all(same, other < i), i32(1), found[1]), [1])
            lead = tirx.all(found[1] == 0, self.seqs[i] >= 0)
            T.buffer_store(self.many, T.Select(lead, found[0], i32(0)), [i])

        strided(self.count, self.thread, THREADS, count)
        barrier()
        with T.If(rows > self.count), T.Then():
            self._count_others(rows)
        barrier()

    def _count_others(self, rows: Any) -> None:
        """Sequences that seem to have few rows may have more elsewhere: warps take turns at counting them."""
        count = local((1,), "int32")
        with T.serial(0, -(-self.count // WARPS), unroll=False) as turn:
            lead = held_int(turn * WARPS + self.warp)
            own = held_int(T.if_then_else(lead < self.count, self.many[T.min(lead, self.count - 1)], 0))
            with T.If(tirx.all(own > 0, own <= FEW)), T.Then():
                seq = held_int(self.seqs[lead])
                T.buffer_store(count, i32(0), [0])
                steps = T.floordiv(rows + (WARP - 1), WARP)
                with T.serial(0, steps, unroll=False) as step, T.If(count[0] <= FEW), T.Then():
                    at = held_int(step * WARP + self.lane)
                    same = held_int(T.if_then_else(at < rows, self.places.seqs[T.min(at, rows - 1)], -1)) == seq
                    T.buffer_store(count, count[0] + bits_set(held(votes(same), "uint32")), [0])
                sync_warp()  # all lanes have read it
                with T.If(self.lane == 0), T.Then():
                    T.buffer_store(self.many, count[0], [lead])

    def _range(self, sequence: Sequence, row: Callable[[Any], Any]) -> None:
        """The slots that some row of the block sees something of."""
        found = local((2,), "int32")
        for turn in range(-(-self.count // WARP)):
            place = held_int(turn * WARP + self.lane)
            own = T.if_then_else(place < self.count, row(T.min(place, self.count - 1)), -1)
            sight = Sight(sequence, held_int(own))
            T.buffer_store(found, T.min(found[0], sight.begin) if turn else sight.begin, [0])
            T.buffer_store(found, T.max(found[1], sight.end) if turn else sight.end, [1])
        if self.places.window:
            warp_reduce(found, 0, lambda a, b: T.min(a, b))
        warp_reduce(found, 1, greater)
        self.first, self.last = found[0] if self.places.window else i32(0), found[1]

    def _chunks(self, sequence: Sequence, total: Record) -> None:
        """All chunks that are seen, in order."""
        start, end = (held_int(chunk) for chunk in chunks_between(self.first, self.last))
        self._copy(sequence, KEYS, start)
        with T.serial(start, end, unroll=False) as chunk:
            begin = held_int(chunk * CHUNK)
            wait_copies(0)
            barrier()  # K is there, V of the chunk before is done with
            self._copy(sequence, VALUES, chunk)
            self.queries.score(self.staged, [i32(number) for number in range(PAGES)], self.scores)
            self.queries.top(self.scores, begin, PAGES)
            sums = self.queries.weigh(self.scores, PAGES)
            weights = self._weights()
            wait_copies(0)
            self._clear(sequence, begin)
            barrier()  # V is there, K is done with
            with T.If(chunk + 1 < end), T.Then():
                self._copy(sequence, KEYS, chunk + 1)
            self._merge(sums, weights, total)
        barrier()  # V is done with

    def _copy(self, sequence: Sequence, side: int, chunk: Any) -> None:
        """Let the warp's pages of K or V come."""
        for p in range(PAIR):
            number = self.warp * PAIR + p
            first = held_int(chunk * CHUNK + number * PAGE)
            seen = held_int(T.Select(self._sees(sequence, first), 1, 0))
            page = held_int(sequence.page(T.Select(seen != 0, first, self.last)))
            self.staged.copy(side, number, page, seen != 0)
        commit_copies()

    def _sees(self, sequence: Sequence, first: Any) -> Any:
        """Whether some row may see a slot of a page."""
        hidden = sequence.hides(first, PAGE)
        return tirx.all(first <= self.last, first + PAGE > self.first, tirx.Not(hidden))

    def _clear(self, sequence: Sequence, begin: Any) -> None:
        """V of the warp's pages that no row sees, if there may be any in the chunk."""
        seen = [begin >= self.first, begin + (CHUNK - 1) <= self.last]
        if sequence.hole:
            seen.append(tirx.any(begin + CHUNK <= sequence.hole[0], begin >= sequence.hole[1]))

        def anybody(slot: Any) -> Any:
            return tirx.all(slot <= self.last, slot >= self.first, *sequence.outside_hole(slot))

        with T.If(tirx.Not(tirx.all(*seen))), T.Then():
            sync_warp()
            for number in (self.warp * PAIR + p for p in range(PAIR)):
                self.staged.clear(number, begin + number * PAGE, anybody)

    def _weights(self) -> Any:
        """All weights as products take them: words of each page."""
        a = local((PAGES * COLUMNS,), "uint32")
        for p in range(PAGES):
            for i, word in enumerate(self.queries.weights(self.scores, p)):
                T.buffer_store(a, word, [p * COLUMNS + i])
        return a

    def _merge(self, sums: list[list[Any]], a: Any, total: Record) -> None:
        """Products of the chunk's weights with V, taken into what there is of chunks before."""
        queries, part = self.queries, Record([0, 1])
        for half in range(HALVES):
            own = sums[half][0]
            for more in sums[half][1:]:
                own = own + more
            T.buffer_store(part.totals, own, [half])
            warp_reduce(part.totals, half, added, lanes=4)
            T.buffer_store(part.tops, queries.tops[half], [half])
        factors = total.meet(part)
        b, new = local((2,), "uint32"), local((TURNS * 4,))
        for turn in range(self.eights // TURNS):
            fill(new, f32(0))
            for p in range(PAGES):
                for eight in range(TURNS):
                    self.staged.values(i32(p), self.values[eight], turn, b)
                    mma(new[eight * 4], a[p * COLUMNS], b[0])
            for at in range(TURNS * 4):
                total.take(turn * TURNS * 4 + at, new[at], factors)

    def _save(self, total: Record, out: Any, place: Callable[[Any, Any, Any], list[Any]]) -> None:
        queries, both = self.queries, local((2,))
        total.finish()
        for half, query in enumerate(queries.queries):
            with T.If(queries.rows[half] >= 0), T.Then():
                head = held_int(T.floormod(query, queries.own))
                for eight in range(self.eights):
                    for e in range(2):
                        T.buffer_store(both, total.average(eight * 4 + half * 2 + e), [e])
                    *where, d = place(queries.rows[half], head, eight * EIGHT + queries.quarter * 2)
                    if str(out.dtype) == "int32":
                        T.buffer_store(out, bf16_pair(both[0], both[1]), [*where, T.floordiv(d, 2)])
                    else:
                        T.buffer_store(out, both[T.ramp(0, 1, 2)], [*where, T.ramp(d, 1, 2)])


def rows_of_block(own: int) -> int:
    """Rows of which a block takes `own` heads each."""
    return WARPS * (TILE // own)
