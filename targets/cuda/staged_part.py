"""A chunk of a sequence of few rows in a block of its own, K and V in shared memory: what decoding consists of.

All that a block finds in tables, and pages that this step does not write to, it reads before the launches in front of
it have ended (targets/cuda/finding.py). Warps share the pages of the chunk to score them, and the elements of V to add
them up, as in targets/cuda/attending.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.attention_block import EIGHT, HALVES, THREADS, TILE, WARPS
from llmc.targets.cuda.finding import FEW, Finding
from llmc.targets.cuda.fragments import COLUMNS
from llmc.targets.cuda.launch import added, barrier, dynamic, f32, fill, greater, local, shared, warp_reduce
from llmc.targets.cuda.prelude import after_launches, commit_copies, mma, sync_warp, wait_copies
from llmc.targets.cuda.sight import CHUNK, Counting, Places, Sequence, Sight, held_int
from llmc.targets.cuda.staged_chunk import KEYS, PAGES, TURNS, VALUES, StagedChunk
from llmc.targets.cuda.staged_queries import PAIR, StagedQueries
from llmc.targets.cuda.target import WARP, CudaTarget

REGISTERS = 128  # of a thread, that it may take however many blocks there would be room for
MOST_EARLY = 64  # rows of a step that are looked through for those that write to a page

# row of the sequence's few, head of the block's, element -> its place in records
Place = Callable[[Any, Any, Any], list[Any]]


class StagedPart:
    """One part; the block's threads, of which all do the same."""

    def __init__(self, queries: StagedQueries, chunk: StagedChunk, places: Places, thread: Any) -> None:
        self.queries, self.staged, self.places, self.thread = queries, chunk, places, thread
        self.turns = queries.size // (TURNS * EIGHT)  # eights of elements of V that a warp has
        self.warp, self.lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        self.finding = Finding(places, thread, WARPS)
        self.weights = shared((PAGES * WARP * COLUMNS,), "uint32")
        self.tops = shared((WARPS, TILE))
        self.totals = shared((WARPS, TILE, 4))
        self.scores = local((PAIR * 2 * 4,))

    def emit(self, part: Any, records: Any, place: Place) -> None:
        """What the chunk gives for each of the rows, into records (..., D + STATISTICS)."""
        self._find(part)
        self._copy(early=True)
        after_launches()
        with T.If(tirx.all(self.count <= FEW, self._sees(self.first, CHUNK))), T.Then():
            self._turns(records, place)

    def _find(self, part: Any) -> None:
        """The part's sequence and rows, and what of the chunk they see."""
        places, finding = self.places, self.finding
        seq = held_int(finding.sequence(part))
        self.count = held_int(finding.few_rows(seq))
        self.first = held_int((part - places.first_part(seq)) * CHUNK)
        self.sequence = Sequence(places, seq, Counting(self.thread, THREADS))
        row = T.if_then_else(
            tirx.all(self.lane < FEW, self.lane < self.count), finding.row(T.min(self.lane, FEW - 1)), -1
        )
        sight, found = Sight(self.sequence, held_int(row)), local((2,), "int32")
        T.buffer_store(found, sight.begin, [0])
        T.buffer_store(found, sight.end, [1])
        warp_reduce(found, 0, lambda a, b: T.min(a, b))
        warp_reduce(found, 1, greater)
        self.begin, self.end = found[0], found[1]
        firsts = [held_int(self.first + (self.warp * PAIR + p) * PAGE) for p in range(PAIR)]
        few = self.count <= FEW
        self.seen = [held_int(T.Select(tirx.all(few, self._sees(first, PAGE)), 1, 0)) for first in firsts]
        ids = [self.sequence.page(T.Select(seen != 0, first, T.max(self.end, 0))) for seen, first in
               zip(self.seen, firsts, strict=True)]  # fmt: skip
        self.pages = [held_int(page) for page in ids]
        self.late = [held_int(T.Select(late, 1, 0)) for late in finding.written(self.pages, MOST_EARLY)]

    def _sees(self, first: Any, count: int) -> Any:
        """Whether some row may see one of so many slots."""
        return tirx.all(
            first <= self.end, first + count > self.begin, tirx.Not(self.sequence.hides(first, count))
        )  # fmt: skip

    def _copy(self, early: bool) -> None:
        """Let the warp's pages come: those that are there already, or those that launches in front have written to."""
        for side in (KEYS, VALUES):
            for p in range(PAIR):
                number = self.warp * PAIR + p
                in_time = self.late[p] == 0 if early else self.late[p] != 0
                with T.If(tirx.all(in_time, self.seen[0] + self.seen[1] > 0)), T.Then():
                    self.staged.copy(side, number, self.pages[p], self.seen[p] != 0)
            commit_copies()

    def _turns(self, records: Any, place: Place) -> None:
        """As many rows at a time as a product has."""
        queries, count = self.queries, self.queries.count
        with T.serial(0, T.floordiv(self.count + (count - 1), count), unroll=False) as turn:
            number = held_int(turn * count)

            def row(i: Any) -> Any:
                at = number + i
                return T.if_then_else(at < self.count, self.finding.row(T.min(at, FEW - 1)), -1)

            queries.look(self.sequence, row)
            queries.read()
            with T.If(turn == 0), T.Then():
                self._copy(early=False)
            self._score()
            self._weigh(turn)
            self._save(records, number, place)

    def _score(self) -> None:
        """Products of all queries with K of the warp's pages; the greatest score of the chunk."""
        wait_copies(1)
        sync_warp()
        queries, first = self.queries, self.first + self.warp * (PAIR * PAGE)
        fill(self.scores, f32(0))
        with T.If(self.seen[0] + self.seen[1] > 0), T.Then():
            queries.score(self.staged, [self.warp * PAIR + p for p in range(PAIR)], self.scores)
        queries.top(self.scores, first, PAIR)
        self._show(self.tops, lambda half: [self.warp, queries.queries[half]], queries.tops, queries.quarter == 0)
        barrier()
        for half, query in enumerate(queries.queries):
            for warp in range(WARPS):
                T.buffer_store(queries.tops, T.max(queries.tops[half], self.tops[warp, query]), [half])

    def _weigh(self, turn: Any) -> None:
        """Weights and their sums to all warps, V without what nobody sees."""
        queries = self.queries
        for half, (one,) in enumerate(queries.weigh(self.scores, PAIR)):
            T.buffer_store(queries.totals, one, [half])
        for p in range(PAIR):
            self._store(self.warp * PAIR + p, queries.weights(self.scores, p))
        self._show(self.totals, lambda half: [self.warp, queries.queries[half], queries.quarter], queries.totals, None)
        with T.If(turn == 0), T.Then():
            wait_copies(0)
            sync_warp()
            self._clear()
        barrier()
        for half, query in enumerate(queries.queries):
            T.buffer_store(queries.totals, self.totals[0, query, queries.quarter], [half])
            for warp in range(1, WARPS):
                more = self.totals[warp, query, queries.quarter]
                T.buffer_store(queries.totals, queries.totals[half] + more, [half])
            warp_reduce(queries.totals, half, added, lanes=4)

    def _clear(self) -> None:
        """V of the warp's pages that no row sees."""
        for p in range(PAIR):
            first = held_int(self.first + (self.warp * PAIR + p) * PAGE)
            whole = tirx.all(first >= self.begin, first + (PAGE - 1) <= self.end, *self._outside(first))
            with T.If(tirx.all(self.seen[p] != 0, tirx.Not(whole))), T.Then():
                self.staged.clear(self.warp * PAIR + p, first, self._anybody)

    def _outside(self, first: Any) -> list[Any]:
        """Conditions that all hold if the hole hides nothing of a page."""
        hole = self.sequence.hole
        return [tirx.any(first + PAGE <= hole[0], first >= hole[1])] if hole else []

    def _anybody(self, slot: Any) -> Any:
        """Whether a row might see a slot."""
        return tirx.all(slot <= self.end, slot >= self.begin, *self.sequence.outside_hole(slot))

    def _show(self, memory: Any, place: Callable[[int], list[Any]], numbers: Any, lanes: Any) -> None:
        """A number of each query to other warps, by some lanes or all."""
        for half in range(HALVES):
            if lanes is None:
                T.buffer_store(memory, numbers[half], place(half))
            else:
                with T.If(lanes), T.Then():
                    T.buffer_store(memory, numbers[half], place(half))

    def _store(self, number: Any, weights: list[Any]) -> None:
        """Weights of a page, as lanes read them."""
        words, at = local((COLUMNS,), "uint32"), (number * WARP + self.lane) * COLUMNS
        for i, word in enumerate(weights):
            T.buffer_store(words, word, [i])
        T.buffer_store(self.weights, words[T.ramp(0, 1, COLUMNS)], [T.ramp(at, 1, COLUMNS)])

    def _add_values(self, sums: Any) -> None:
        """Products of all weights with the warp's elements of V."""
        a, b = local((COLUMNS,), "uint32"), local((2,), "uint32")
        fill(sums, f32(0))
        own = self.staged.value_place(self.warp)
        with T.serial(0, PAGES // PAIR, unroll=False) as pair:
            first = held_int(self.first + pair * (PAIR * PAGE))
            seen = tirx.any(*(self._sees(first + p * PAGE, PAGE) for p in range(PAIR)))
            with T.If(seen), T.Then():
                for number in (pair * PAIR + p for p in range(PAIR)):
                    at = (number * WARP + self.lane) * COLUMNS
                    T.buffer_store(a, self.weights[T.ramp(at, 1, COLUMNS)], [T.ramp(0, 1, COLUMNS)])
                    for turn in range(self.turns):
                        self.staged.values(number, own, turn, b)
                        mma(sums[turn * 4], a[0], b[0])

    def _save(self, records: Any, number: Any, place: Place) -> None:
        """Sums, then the totals and the greatest scores, of rows from the sequence's `number`-th on."""
        queries, own, sums = self.queries, self.queries.own, local((self.turns * 4,))
        self._add_values(sums)
        for half, query in enumerate(queries.queries):
            with T.If(queries.rows[half] >= 0), T.Then():
                row, head = held_int(number + T.floordiv(query, own)), held_int(T.floormod(query, own))
                for turn in range(self.turns):
                    d = (turn * TURNS + self.warp) * EIGHT + queries.quarter * 2
                    both = sums[T.ramp(turn * 4 + half * 2, 1, 2)]
                    *where, first = place(row, head, d)
                    T.buffer_store(records, both, [*where, T.ramp(first, 1, 2)])
                with T.If(tirx.all(queries.quarter == 0, self.warp == 0)), T.Then():
                    T.buffer_store(records, queries.totals[half], place(row, head, queries.size))
                    T.buffer_store(records, queries.tops[half], place(row, head, queries.size + 1))


def part_bytes(size: int) -> int:
    """Of shared memory, that a part takes for heads of so many elements."""
    return 4 * StagedChunk.words(size) + _BESIDE


def parts_together(target: CudaTarget, size: int) -> int:
    """Blocks of a multiprocessor that registers are saved for: as many as have room, if a thread has REGISTERS then."""
    return min(target.shared_bytes // part_bytes(size), target.registers // (THREADS * REGISTERS))


def part_memory(size: int) -> Any:
    """What a part has of a chunk."""
    return dynamic(StagedChunk.words(size), _BESIDE)


# Weights, what warps show each other, and rows that they have found.
_BESIDE = 4 * (PAGES * WARP * COLUMNS + WARPS * TILE * 5 + WARPS * FEW)
