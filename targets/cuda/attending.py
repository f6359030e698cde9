"""How a block attends on CUDA: query heads of some rows of a sequence to a chunk of its slots, by tensor cores.

A query is a head of a row; those that share a kv head stand together, 16 of them make a tile, the rows of one product.
Warps share the slots of a chunk to score them, two pages each, and the elements of V to add these up. Weights go from
the one to the other through shared memory, as products take them.

Which slots and elements of a product are which is ours to choose, so that lanes keep what they read: with
lane = 4 g + q, of K a lane reads elements 4 q.. of 16 for slots 2 g and 2 g + 1 of a page, which are column g of two
products. So of these products' sums it holds slots 4 q.. of queries g and g + 8, the very ones whose weights it gives
to the next product; of V it reads those slots, and neighbouring elements for column g of as many products.

A query's numbers depend on no other query: where it stands in a tile, and how many tiles there are, changes no bits.
What a query does not see has weight 0; V is taken for 0 where no query of the block sees it, whatever lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.attention_block import (
    EIGHT,
    HALVES,
    THREADS,
    TILE,
    WARP_PAGES,
    WARPS,
    WEIGHT_PARTS,
    Block,
    K,
)
from llmc.targets.cuda.fragments import COLUMNS, Parts, parted, products
from llmc.targets.cuda.kv_kind import Pages, Token
from llmc.targets.cuda.launch import (
    added,
    barrier,
    f32,
    fill,
    greater,
    local,
    shared,
    strided,
    u32,
    warp_reduce,
)  # fmt: skip
from llmc.targets.cuda.prelude import exp2, mma
from llmc.targets.cuda.records import LOWEST, Record
from llmc.targets.cuda.scoring import Scoring
from llmc.targets.cuda.sight import CHUNK, Sequence, Sight, chunks_between, held_int
from llmc.targets.cuda.target import WARP


class Attending:
    """Queries of a block, and what they make of one chunk after another."""

    def __init__(
        self, block: Block, pages: Pages, q: Any, kv: Any, scoring: Scoring, share: Any, group: Any, thread: Any
    ) -> None:
        """`share`: heads share * block.heads.. of q (M, ...), which read this `group` of kv heads."""
        self.block, self.pages, self.q, self.kv, self.scoring, self.thread = block, pages, q, kv, scoring, thread
        self.first_head, self.group = share * block.heads, group
        self.warp, self.lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        self.column, self.quarter = T.floordiv(self.lane, 4), T.floormod(self.lane, 4)
        self.queries = shared((block.tiles * block.steps * block.parts * WARP * COLUMNS,), "uint32")
        self.weights = shared((block.tiles * (CHUNK // PAGE) * WEIGHT_PARTS * WARP * COLUMNS,), "uint32")
        self.found = [shared((WARPS, block.queries)) for _ in range(2)]  # by warps: greatest scores, sums of weights
        self.rows = shared((block.queries,), "int32")
        self.own_rows = local((block.tiles * HALVES,), "int32")
        self.own = [t * TILE + half * EIGHT + self.column for t in range(block.tiles) for half in range(HALVES)]
        self.heads = [held_int(self.first_head + T.floormod(query, block.heads)) for query in self.own]
        self.slopes = [scoring.slope(head) for head in self.heads]
        self.scores = local((WARP_PAGES * 2 * block.tiles * 4,))

    def record(self) -> Record:
        """One of the thread's queries and elements."""
        return Record(self.block.owners)

    def clear(self, total: Record) -> None:
        """Nothing seen yet, but sinks."""
        total.clear(None if self.scoring.sinks is None else [self.scoring.sink(head) for head in self.heads])

    def look(self, sequence: Sequence, row: Callable[[Any], Any]) -> None:
        """Take queries of this sequence's rows: `row(i)` is that of the block's i-th, -1 if there is none."""
        self.sequence = sequence
        barrier()  # rows before are done with
        strided(
            self.block.queries, self.thread, THREADS,
            lambda i: T.buffer_store(self.rows, row(T.floordiv(i, self.block.heads)), [i]),
        )  # fmt: skip
        barrier()
        for i, query in enumerate(self.own):
            T.buffer_store(self.own_rows, self.rows[query], [i])
        self.sights = [Sight(sequence, self.own_rows[i]) for i in range(len(self.own))]
        self.begin = self._of_all([sight.begin for sight in self.sights], lambda a, b: T.min(a, b))
        self.end = self._of_all([sight.end for sight in self.sights], greater)
        self._stage_queries()

    def _of_all(self, numbers: list[Any], combine: Any) -> Any:
        """int32 numbers of all queries combined: lanes of any warp have them all."""
        found = local((1,), "int32")
        T.buffer_store(found, numbers[0], [0])
        for number in numbers[1:]:
            T.buffer_store(found, combine(found[0], number), [0])
        warp_reduce(found, 0, combine)
        return found[0]

    def _stage_queries(self) -> None:
        """Into shared memory, as lanes read them."""
        block, size = self.block, self.block.size

        def one(i: Any) -> None:
            lane, step, tile = (
                T.floormod(i, WARP),
                T.floormod(T.floordiv(i, WARP), block.steps),
                T.floordiv(i, WARP * block.steps),
            )
            first, both = step * K + T.floormod(lane, 4) * COLUMNS, []
            for half in range(HALVES):
                query = tile * TILE + half * EIGHT + T.floordiv(lane, 4)
                row = held_int(T.max(self.rows[query], 0))  # of nobody's queries any: nothing is made of them
                begin = held_int((self.first_head + T.floormod(query, block.heads)) * size + first)
                numbers = [self.q[row, begin + e] for e in range(COLUMNS)]
                if size % K:
                    numbers = [T.if_then_else(first + e < size, n, f32(0)) for e, n in enumerate(numbers)]
                both.append(parted([self.pages.query(n) for n in numbers], block.parts))
            self._store_words(self.queries, tile * block.steps + step, lane, both)

        strided(block.tiles * block.steps * WARP, self.thread, THREADS, one)
        barrier()

    def _store_words(self, memory: Any, place: Any, lane: Any, both: list[Parts]) -> None:
        """What one lane has of a product's 16 queries: parts of both halves' four numbers."""
        words, parts = local((COLUMNS,), "uint32"), len(both[0])
        for part in range(parts):
            for i in range(COLUMNS):
                T.buffer_store(words, both[i % 2][part][i // 2], [i])
            at = ((place * parts + part) * WARP + lane) * COLUMNS
            T.buffer_store(memory, words[T.ramp(0, 1, COLUMNS)], [T.ramp(at, 1, COLUMNS)])

    def _load_words(self, memory: Any, place: Any, parts: int, to: Any, first: int = 0) -> None:
        """The same into to[first:], for this lane."""
        for part in range(parts):
            at = ((place * parts + part) * WARP + self.lane) * COLUMNS
            to_words = T.ramp(first + part * COLUMNS, 1, COLUMNS)
            T.buffer_store(to, memory[T.ramp(at, 1, COLUMNS)], [to_words])

    @property
    def chunks(self) -> tuple[Any, Any]:
        """The first chunk that a query sees something of, and the number after the last one."""
        return chunks_between(self.begin, self.end)

    def attend(self, chunk: Any, to: Record) -> None:
        """A chunk's record; some query sees something in or after it."""
        self._score(chunk * CHUNK)
        self._weigh(chunk * CHUNK, to)
        self._add_values(chunk * CHUNK, to)

    def _page(self, first: Any) -> Any:
        """The page of 16 slots; if nobody sees any of them, one that there is."""
        seen = tirx.all(
            first <= self.end, first + PAGE > self.begin, tirx.Not(self.sequence.hides(first, PAGE))
        )  # fmt: skip
        return held_int(self.sequence.page(T.Select(seen, first, self.end)))

    def _score(self, begin: Any) -> None:
        """Products of all queries with K of the warp's slots."""
        block, parts = self.block, self.block.parts
        fill(self.scores, f32(0))
        pages = [self._page(begin + (self.warp * WARP_PAGES + p) * PAGE) for p in range(WARP_PAGES)]
        words = 2 * HALVES * parts
        a, b, ahead = (local((count,), "uint32") for count in (parts * COLUMNS, *[WARP_PAGES * words] * 2))

        def load(step: Any, to: Any) -> None:
            for p, page in enumerate(pages):
                at = Token(self.kv, page, self.group, self.column * 2, block.size)
                self._load_keys(at, step * (K // COLUMNS) + self.quarter, to, p * words)

        def multiply(step: Any) -> None:
            for t in range(block.tiles):
                self._load_words(self.queries, t * block.steps + step, parts, a)
                for i, j in products(parts, parts):
                    for product in range(WARP_PAGES * 2):
                        mma(self.scores[(product * block.tiles + t) * 4], a[i * COLUMNS], b[(product * parts + j) * 2])

        if block.tiles == 1:
            with T.serial(0, block.steps, unroll=block.unroll) as step:
                load(step, b)
                multiply(step)
            return
        load(0, b)
        with T.serial(0, block.steps, unroll=block.unroll) as step:
            load(T.min(step + 1, block.steps - 1), ahead)  # under way while the others are multiplied
            multiply(step)
            for i in range(WARP_PAGES * words):
                T.buffer_store(b, ahead[i], [i])

    def _load_keys(self, at: Token, quad: Any, b: Any, first: int) -> None:
        """Four elements of K of two neighbouring slots, words of each part, into b[first:]; zeros beyond the last."""

        def load() -> None:
            for place, word in enumerate(
                word for slot in self.pages.key_words(at, quad) for part in slot for word in part
            ):
                T.buffer_store(b, word, [first + place])

        if self.block.size % K == 0:
            load()
            return
        with T.If(quad * COLUMNS < self.block.size):
            with T.Then():
                load()
            with T.Else():
                for place in range(4 * self.block.parts):
                    T.buffer_store(b, u32(0), [first + place])

    def _slot(self, begin: Any, p: int, place: int) -> Any:
        """A slot that the lane has scores of: one of four in each of the warp's pages."""
        return begin + (self.warp * WARP_PAGES + p) * PAGE + self.quarter * 4 + place

    def _places(self, which: int) -> list[tuple[int, int, int]]:
        """(page, place there, where in `scores`) of the scores that the lane has of one of its queries."""
        t, half = divmod(which, HALVES)
        return [
            (p, place, ((p * 2 + place % 2) * self.block.tiles + t) * 4 + half * 2 + place // 2)
            for p in range(WARP_PAGES)
            for place in range(4)
        ]

    def _weigh(self, begin: Any, to: Record) -> None:
        """Scores -> weights by the greatest of the chunk, in shared memory; the greatest, and sums, into the record."""
        count = len(self.own)
        for which, (head, slope) in enumerate(zip(self.heads, self.slopes, strict=True)):
            T.buffer_store(to.tops, f32(LOWEST), [which])
            for p, place, at in self._places(which):
                slot, sight = self._slot(begin, p, place), self.sights[which]
                score = self.scoring.score(self.scores[at], head, slope, sight.place(slot))
                T.buffer_store(self.scores, T.Select(sight.sees(slot), score, f32(LOWEST)), [at])
                T.buffer_store(to.tops, T.max(to.tops[which], self.scores[at]), [which])
        self._combine(to.tops, count, 0, greater)
        for which in range(count):
            T.buffer_store(to.totals, f32(0), [which])
            for p, place, at in self._places(which):
                slot = self._slot(begin, p, place)
                seen = self.sights[which].sees(slot)
                weight = T.Select(seen, exp2(self.scores[at] - to.tops[which]), f32(0))
                T.buffer_store(self.scores, weight, [at])
                T.buffer_store(to.totals, to.totals[which] + self.scores[at], [which])
        for t in range(self.block.tiles):
            for p in range(WARP_PAGES):
                both = [
                    parted(
                        [self.scores[at] for page, _, at in self._places(t * HALVES + half) if page == p],
                        WEIGHT_PARTS,
                    )
                    for half in range(HALVES)
                ]
                place = t * (CHUNK // PAGE) + self.warp * WARP_PAGES + p
                self._store_words(self.weights, place, self.lane, both)
        self._combine(to.totals, count, 1, added)

    def _combine(self, numbers: Any, count: int, which: int, combine: Any) -> None:
        """A number of each query, from the lanes that have some of its slots, and from all warps in their order."""
        for i in range(count):
            warp_reduce(numbers, i, combine, lanes=4)
            with T.If(self.quarter == 0), T.Then():
                T.buffer_store(self.found[which], numbers[i], [self.warp, self.own[i]])
        barrier()
        for i in range(count):
            T.buffer_store(numbers, self.found[which][0, self.own[i]], [i])
            for warp in range(1, WARPS):
                T.buffer_store(numbers, combine(numbers[i], self.found[which][warp, self.own[i]]), [i])

    def _add_values(self, begin: Any, to: Record) -> None:
        """Products of all weights with the warp's elements of V."""
        block, parts = self.block, self.block.parts
        fill(to.sums, f32(0))
        a = local((block.tiles * WEIGHT_PARTS * COLUMNS,), "uint32")
        b = local((block.vector * parts * 2,), "uint32")
        masks = local((2,), "uint32")
        with T.serial(0, CHUNK // PAGE, unroll=block.unroll) as page:
            first = begin + page * PAGE
            at = Token(self.kv, self._page(first), self.group, self.quarter * 4, block.size)
            for i in range(2):
                two = [self._anybody(first + self.quarter * 4 + i * 2 + j) for j in range(2)]
                low, high = (
                    T.Select(seen, u32(mask), u32(0)) for seen, mask in zip(two, (0xFFFF, 0xFFFF0000), strict=True)
                )
                T.buffer_store(masks, low | high, [i])
            for t in range(block.tiles):
                place = t * (CHUNK // PAGE) + page
                self._load_words(self.weights, place, WEIGHT_PARTS, a, t * WEIGHT_PARTS * COLUMNS)
            for own in range(block.own_groups):
                group = own * WARPS + self.warp
                with T.If(group < block.groups), T.Then():
                    self._load_values(at, (group * EIGHT + self.column) * block.vector, masks, b)
                    for i, j in products(WEIGHT_PARTS, parts):
                        for v in range(block.vector):
                            for t in range(block.tiles):
                                sum_at = ((own * block.vector + v) * block.tiles + t) * 4
                                mma(to.sums[sum_at], a[(t * WEIGHT_PARTS + i) * COLUMNS], b[(v * parts + j) * 2])

    def _anybody(self, slot: Any) -> Any:
        """Whether a query of the block might see a slot."""
        return tirx.all(slot <= self.end, slot >= self.begin, *self.sequence.outside_hole(slot))

    def _load_values(self, at: Token, d: Any, masks: Any, b: Any) -> None:
        """Neighbouring elements of V of four slots, words of each part, into b; zeros for what nobody sees."""
        block = self.block

        def load() -> None:
            for i in range(2):
                for v, words in enumerate(self.pages.value_words(at.of(at.place + 2 * i), d, block.vector)):
                    for part, word in enumerate(words):
                        T.buffer_store(b, word & masks[i], [(v * block.parts + part) * 2 + i])

        if block.size % (EIGHT * block.vector) == 0:
            load()
            return
        with T.If(d < block.size):
            with T.Then():
                load()
            with T.Else():
                for i in range(2 * block.vector * block.parts):
                    T.buffer_store(b, u32(0), [i])

    def each_sum(self, body: Callable[[int, Any, Any, Any], None]) -> None:
        """body(which of the thread's sums, query of the block, its row, element) for those of somebody's queries."""
        block = self.block
        for at, owner in enumerate(block.owners):
            group, inside = divmod(at // (block.tiles * 4), block.vector)
            column = self.quarter * 2 + at % 2
            d = ((group * WARPS + self.warp) * EIGHT + column) * block.vector + inside
            with T.If(tirx.all(self.own_rows[owner] >= 0, d < block.size)), T.Then():
                body(at, self.own[owner], self.own_rows[owner], d)
