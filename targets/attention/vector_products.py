"""Attention's products by vectors: of a group of queries, those of each sixteen tokens, or of sixteen elements of V."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.attention.online_softmax import Attending, Block, Records
from llmc.targets.attention.sight import CHUNK
from llmc.targets.target import Target
from llmc.targets.vector import LANES, f32, lanes, registers, splat

# Vectors that the registers hold -> query vectors of a group. Of 32 as many as leave room for two pages. Of 8 six would
# do, but for pairs of bfloat16 and what is made of them: LLVM then keeps a sum in memory, and all wait for that.
_MOST = {32: 12, 8: 5, 4: 2}


class VectorAttending(Attending):
    """Sums, what is multiplied with all of a group, and one query stay in the machine's registers."""

    usual = 24

    @classmethod
    def block_of(cls, target: Target, rows: int, heads: int) -> Block:
        """A block of so many rows and heads."""
        return Block(rows, heads, _MOST[target.vectors])

    @property
    def _at_once(self) -> int:
        """Registers of keys or values that are multiplied with a group at once."""
        return (self.target.vectors - 1) // (self.block.vectors + 1)

    @property
    def _pages(self) -> int:
        """Pages whose scores are made at once."""
        return min(2, self._at_once)

    @property
    def ticks(self) -> int:
        """Turns of loops over products in a whole chunk."""
        block, kv = self.block, self.kv
        scored = -(-CHUNK // self._pages) * block.groups * (kv.elements // kv.unit)
        spans = sum(blocks for _, blocks, _ in kv.spans(self._at_once))
        return scored + block.groups * spans * CHUNK * (PAGE // kv.at_once)

    def score(self, many: Any) -> None:
        """Products of all vectors with the keys of the chunk's pages; V of these pages is fetched meanwhile."""
        block, kv = self.block, self.kv
        units = kv.elements // kv.unit
        with T.serial(0, T.floordiv(many + (self._pages - 1), self._pages)) as some, T.serial(0, block.groups) as part:
            own = part * block.vectors
            pages = [self.pages[some * self._pages + p] for p in range(self._pages)]
            sums = registers((self._pages * block.vectors * LANES,), "float32")
            places = [[lanes((p * block.vectors + v) * LANES) for v in range(block.vectors)] for p in range(len(pages))]
            for row in places:
                for v, place in enumerate(row):
                    T.buffer_store(sums, kv.first_sum(own + v), [place])
            with T.serial(0, units) as unit:
                done, all = part * units + unit, block.groups * units
                with self.far():
                    for page in pages:
                        kv.fetch(page, 1, self.group, done, all, far=True)
                if kv.fetches:
                    for p in range(self._pages):
                        kv.fetch(self.pages[(some + 1) * self._pages + p], 0, self.group, done, all, far=False)
                keys = [kv.key_unit(page, self.group, unit) for page in pages]
                for e, own_keys in enumerate(zip(*keys, strict=True)):
                    for v in range(block.vectors):
                        query = self.queries[(own + v) * kv.width + unit * kv.unit + e]
                        for key, row in zip(own_keys, places, strict=True):
                            T.buffer_store(sums, kv.multiply(query, key, sums[row[v]]), [row[v]])
            for p, row in enumerate(places):
                for v, place in enumerate(row):
                    products = kv.products(sums[place], pages[p], self.group)
                    T.buffer_store(self.scores, products, [lanes(self.place(some * self._pages + p, own + v))])

    def mix(self, many: Any, to: Records, following: tuple[Any, Any]) -> None:
        """Weights times values, into the records; K of what is following is fetched meanwhile."""
        with T.serial(0, self.block.groups) as part:
            for first, blocks, count in self.kv.spans(self._at_once):
                with T.serial(0, blocks) as step:
                    self._mix_span(many, to, following, part, first + step * count, count)

    def _mix_span(
        self, many: Any, to: Records, following: tuple[Any, Any], part: Any, register: Any, count: int
    ) -> None:
        """`count` registers of each value for a group of vectors."""
        block, kv = self.block, self.kv
        sums = registers((block.vectors * count * LANES,), "float32")
        places = [[lanes((v * count + c) * LANES) for c in range(count)] for v in range(block.vectors)]
        for row in places:
            for place in row:
                T.buffer_store(sums, splat(f32(0)), [place])
        kv.begin_span(block.vectors)
        with T.serial(0, many) as i:
            self._mix_page(i, following, part, register, sums, places)
        for v, row in enumerate(places):
            for c, place in enumerate(row):
                to.put(kv.end_span(v, sums[place]), part * block.vectors + v, kv.column(register + c))

    def _mix_page(
        self, i: Any, following: tuple[Any, Any], part: Any, register: Any, sums: Any, places: list[list[Any]]
    ) -> None:
        """Add to sums, which each vector has some of at its places, what the i-th page gives to them."""
        block, kv, page, count = self.block, self.kv, self.pages[i], len(places[0])
        own, spans = part * block.vectors, -(-(kv.width // LANES) // count)
        passed, parts = T.floordiv(part * (kv.width // LANES) + register, count), block.groups * spans
        head, ahead = following
        if not kv.fetches:
            kv.fetch(self.pages[i + ahead], 0, head, passed, parts, far=True)
        given = [self.scores[lanes(self.place(i, own + v))] for v in range(block.vectors)]
        scaled = kv.span_weights(given, page, self.group, register)

        def add(run: range, step: Any, known: Any) -> None:
            """Some of the sums of each vector, a step of the page; `known`: how many tokens it has, None: all."""
            if kv.fetches:
                done, all = passed * kv.fetches + step, parts * kv.fetches
                with self.far():
                    kv.fetch(self.pages[i + ahead], 0, head, done, all, far=True)
                kv.fetch(self.pages[i + 1], 1, self.group, done, all, far=False)
            for at, values in kv.mixed(page, self.group, step, register, count, known):
                for v, row in enumerate(places):
                    own_weight = self.scores[self.place(i, own + v) + at]
                    weight = own_weight if scaled is None else scaled[v * LANES + at]
                    for c in run:
                        T.buffer_store(sums, kv.multiply(weight, values[c], sums[row[c]]), [row[c]])

        tokens = self.sight.tokens(self.indexes[i])
        for first in range(0, count, self._at_once):
            self._each_step(tokens, partial(add, range(first, min(first + self._at_once, count))))

    def _each_step(self, tokens: Any, add: Callable[[Any, Any], None]) -> None:
        """`add(step, known)` for each step of a page with so many tokens: for most pages all are known to be there."""
        at_once = self.kv.at_once
        steps = T.floordiv(tokens + (at_once - 1), at_once)
        if at_once == 1:
            with T.serial(0, steps) as step:
                add(step, tokens)
            return
        with T.If(tokens == PAGE):
            with T.Then(), T.serial(0, PAGE // at_once) as step:
                add(step, None)
            with T.Else(), T.serial(0, steps) as step:
                add(step, tokens)
