"""Attention's products on tile registers (targets/tiles.py): K and V of pages of bfloat16 are tiles as they lie.

Rows alone go through tiles too, so that they have the bits that they have beside others: a tile adds up even columns and
odd ones by themselves. With query heads that share a kv head that is also the fewest instructions.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets import tiles
from llmc.targets.attention.online_softmax import Attending, Block, Records
from llmc.targets.attention.sight import CHUNK
from llmc.targets.target import Target
from llmc.targets.vector import LANES, registers


class TileAttending(Attending):
    """Two groups of up to sixteen queries are multiplied with two pages, or with 32 elements of V, at once."""

    usual = tiles.LEFTS * tiles.ROWS

    @classmethod
    def block_of(cls, target: Target, rows: int, heads: int) -> Block:
        """A block of so many rows and heads."""
        return Block(rows, heads, tiles.ROWS)

    @property
    def ticks(self) -> int:
        """Turns of loops over products in a whole chunk."""
        scored = CHUNK // tiles.RIGHTS * (self.kv.pairs // self.kv.tile_pairs)
        return len(self._parts) * (scored + CHUNK * self._spans)

    @property
    def _parts(self) -> list[range]:
        """Groups that are multiplied together."""
        groups = self.block.groups
        return [range(start, min(start + tiles.LEFTS, groups)) for start in range(0, groups, tiles.LEFTS)]

    @property
    def _spans(self) -> int:
        """Of V, what is summed at once."""
        return -(-self.kv.size // (tiles.RIGHTS * LANES))

    def score(self, many: Any) -> None:
        """Products of all vectors with the keys of the chunk's pages; V of these pages is fetched meanwhile."""
        tiles.configure_pairs(self.block.vectors, self.kv.tile_pairs)
        with T.serial(0, T.floordiv(many + (tiles.RIGHTS - 1), tiles.RIGHTS)) as some:
            for number, part in enumerate(self._parts):
                self._score_part(some * tiles.RIGHTS, number, part)

    def _score_part(self, first: Any, number: int, part: range) -> None:
        """Products of some groups with two pages."""
        kv, vectors, steps = self.kv, self.block.vectors, self.kv.pairs // self.kv.tile_pairs
        pages = [self.pages[first + p] for p in range(tiles.RIGHTS)]
        both = list(product(range(len(part)), range(tiles.RIGHTS)))
        for left, right in both:
            tiles.clear_sums(left, right)
        with T.serial(0, steps) as step:
            done, all = number * steps + step, len(self._parts) * steps
            with self.far():
                for page in pages:
                    kv.fetch(page, 1, self.group, done, all, far=True)
            for p in range(tiles.RIGHTS):
                kv.fetch(self.pages[first + tiles.RIGHTS + p], 0, self.group, done, all, far=False)
            pair = step * kv.tile_pairs
            for left, own in enumerate(part):
                tiles.load_left(left, self.queries, own * vectors * kv.width + pair, kv.width)
            for right, page in enumerate(pages):
                tiles.load_right(right, kv.buffer, *kv.key_tile(page, self.group, pair))
            for left, right in both:
                tiles.add_products(left, right)
        for left, right in both:
            place = self.place(first + right, part[left] * vectors)
            tiles.store_sums(left, right, self.scores, place, LANES)

    def mix(self, many: Any, to: Records, following: tuple[Any, Any]) -> None:
        """Weights times values, into the records; K of what is following is fetched meanwhile."""
        kv, last = self.kv, many - 1
        tiles.configure_pairs(self.block.vectors, PAGE // 2)
        tail = registers((PAGE // 2 * kv.size,), "int32")
        tokens = self.sight.tokens(self.indexes[last])
        whole = registers((1,), "int32")  # pages that have all their tokens: all but perhaps the last
        T.buffer_store(whole, T.Select(tokens < PAGE, last, many), [0])
        with T.If(whole[0] < many), T.Then():
            kv.copy_values(self.pages[last], self.group, tokens, tail)
        columns = kv.size // LANES
        for number, part in enumerate(self._parts):
            before = number * self._spans
            with T.serial(0, columns // tiles.RIGHTS) as span:
                self._mix_span(whole[0], many, tail, to, following, part, span * tiles.RIGHTS, tiles.RIGHTS, before + span)
            if columns % tiles.RIGHTS:
                self._mix_span(whole[0], many, tail, to, following, part, columns - 1, 1, before + self._spans - 1)
        tiles.release()

    def _mix_span(self, whole, many, tail, to, following, part, register, count, done) -> None:
        """`count` registers of each value for some groups."""
        kv, vectors, (head, ahead) = self.kv, self.block.vectors, following
        all = len(self._parts) * self._spans
        both = list(product(range(len(part)), range(count)))
        for left, right in both:
            tiles.clear_sums(left, right)

        def add(i, buffer, places):
            for left, own in enumerate(part):
                tiles.load_left(left, self.scores, self.place(i, own * vectors), LANES)
            for right, place in enumerate(places):
                tiles.load_right(right, buffer, *place)
            for left, right in both:
                tiles.add_products(left, right)

        columns = [(register + c) * LANES for c in range(count)]
        with T.serial(0, whole) as i:
            with self.far():
                kv.fetch(self.pages[i + ahead], 0, head, done, all, far=True)
            kv.fetch(self.pages[i + 1], 1, self.group, done, all, far=False)
            add(i, kv.buffer, [kv.value_tile(self.pages[i], self.group, column) for column in columns])
        with T.If(whole < many), T.Then():
            add(whole, tail, [(column, kv.size) for column in columns])
        for left, right in both:
            place = to.start + part[left] * vectors * Records.size(to.width) + columns[right]
            tiles.store_sums(left, right, to.buffer, place, Records.size(to.width))
