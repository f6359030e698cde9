"""Attention's products on tile registers (targets/tiles.py): K and V of pages of bfloat16 are tiles as they lie.

Rows alone go through tiles too, so that they have the bits that they have beside others: a tile adds up even columns
and odd ones by themselves. Where query heads share a kv head that is also the fewest instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    usual = 48  # measured: more share what is loaded, fewer keep their scores in the first-level cache

    @classmethod
    def block_of(cls, target: Target, rows: int, heads: int) -> Block:
        """A block of so many rows and heads."""
        return Block(rows, heads, tiles.ROWS)

    @property
    def ticks(self) -> int:
        """Turns of loops over products in a whole chunk."""
        scored = CHUNK // tiles.RIGHTS * (self.kv.pairs // self.kv.tile_pairs)
        return len(self.parts) * (scored + CHUNK * self.spans)

    @property
    def parts(self) -> list[range]:
        """Groups that are multiplied together."""
        groups = self.block.groups
        return [range(start, min(start + tiles.LEFTS, groups)) for start in range(0, groups, tiles.LEFTS)]

    @property
    def spans(self) -> int:
        """Of V, what is summed at once."""
        return -(-self.kv.size // (tiles.RIGHTS * LANES))

    def score(self, many: Any) -> None:
        """Products of all vectors with the keys of the chunk's pages; V of these pages is fetched meanwhile."""
        tiles.configure_pairs(self.block.vectors, self.kv.tile_pairs)
        with T.serial(0, T.floordiv(many + (tiles.RIGHTS - 1), tiles.RIGHTS)) as some:
            for number, part in enumerate(self.parts):
                with self._if_there(part):
                    self._score_part(some * tiles.RIGHTS, number, part)

    def _score_part(self, first: Any, number: int, part: range) -> None:
        """Products of some groups with two pages."""
        kv, vectors, steps = self.kv, self.block.vectors, self.kv.pairs // self.kv.tile_pairs
        pages = [self.pages[first + p] for p in range(tiles.RIGHTS)]
        both = list(product(range(len(part)), range(tiles.RIGHTS)))
        for left, right in both:
            tiles.clear_sums(left * tiles.RIGHTS + right)
        with T.serial(0, steps) as step:
            done, all = number * steps + step, len(self.parts) * steps
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
                tiles.add_products(left * tiles.RIGHTS + right, left, right)
        for left, right in both:
            place = self.place(first + right, part[left] * vectors)
            tiles.store_sums(left * tiles.RIGHTS + right, self.scores, place, LANES)

    def mix(self, many: Any, to: Records, following: tuple[Any, Any]) -> None:
        """Weights times values, into the records; K of what is following is fetched meanwhile."""
        tiles.configure_pairs(self.block.vectors, PAGE // 2)
        mix = _Mix(self, many, to, following)
        columns = self.kv.size // LANES
        for number, part in enumerate(self.parts):
            before = number * self.spans
            with self._if_there(part):
                with T.serial(0, columns // tiles.RIGHTS) as span:
                    mix.add(part, span * tiles.RIGHTS, tiles.RIGHTS, before + span)
                if columns % tiles.RIGHTS:
                    mix.add(part, columns - 1, 1, before + self.spans - 1)
        tiles.release()

    @contextmanager
    def _if_there(self, part: range) -> Iterator[None]:
        """What is done with some groups, if a row is in them."""
        if part.start == 0:
            yield
            return
        with T.If(self.count * self.block.heads > part.start * self.block.vectors), T.Then():
            yield


class _Mix:
    """The weights of a chunk times its values.

    Of a page that is not full the tokens behind the last may be any number, NaN too: it is copied without them.
    """

    def __init__(self, attending: TileAttending, many: Any, to: Records, following: tuple[Any, Any]) -> None:
        self.attending, self.many, self.to, self.following = attending, many, to, following
        kv, last = attending.kv, many - 1
        tokens = attending.sight.tokens(attending.indexes[last])
        self.copy = registers((PAGE // 2 * kv.size,), "int32")
        found = registers((1,), "int32")
        T.buffer_store(found, T.Select(tokens < PAGE, last, many), [0])
        self.full = found[0]  # pages: all but perhaps the last
        with T.If(self.full < many), T.Then():
            kv.copy_values(attending.pages[last], attending.group, tokens, self.copy)

    def add(self, part: range, register: Any, count: int, done: Any) -> None:
        """`count` registers of each value for some groups, which is the `done`-th of such turns."""
        attending, (head, ahead) = self.attending, self.following
        kv, pages, turns = attending.kv, attending.pages, len(attending.parts) * attending.spans
        columns = [(register + c) * LANES for c in range(count)]
        for left, right in product(range(len(part)), range(count)):
            tiles.clear_sums(left * tiles.RIGHTS + right)
        with T.serial(0, self.full) as i:
            with attending.far():
                kv.fetch(pages[i + ahead], 0, head, done, turns, far=True)
            kv.fetch(pages[i + 1], 1, attending.group, done, turns, far=False)
            places = [kv.value_tile(pages[i], attending.group, column) for column in columns]
            self._add_page(i, part, kv.buffer, places)
        with T.If(self.full < self.many), T.Then():
            self._add_page(self.full, part, self.copy, [(column, kv.size) for column in columns])
        size = Records.size(self.to.width)
        for left, right in product(range(len(part)), range(count)):
            place = self.to.start + part[left] * attending.block.vectors * size + columns[right]
            tiles.store_sums(left * tiles.RIGHTS + right, self.to.buffer, place, size)

    def _add_page(self, page: Any, part: range, values: Any, places: list[tuple[Any, int]]) -> None:
        """Products of a page's weights with values, of which tiles begin at those places."""
        attending = self.attending
        for left, own in enumerate(part):
            start = attending.place(page, own * attending.block.vectors)
            tiles.load_left(left, attending.scores, start, LANES)
        for right, (start, apart) in enumerate(places):
            tiles.load_right(right, values, start, apart)
        for left, right in product(range(len(part)), range(len(places))):
            tiles.add_products(left * tiles.RIGHTS + right, left, right)
