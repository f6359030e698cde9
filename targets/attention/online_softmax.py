"""Softmax over the pages of one sequence, for a block of query vectors: the middle of every attention.

A page of a kv head is 16 tokens: in K one element of all tokens lies together, so a vector of scores grows one
multiply-add an element, and in V a token's elements do. What a page holds is in kv_plain.py, kv_q8.py and kv_q4.py.

A chunk is sixteen pages. Of each a record is made: scores of all its tokens, their softmax, the mix of values; and the
records of chunks are merged in order. Where chunks begin and what a row's record of one is depends on the row alone,
so it does not matter which rows stand in a block or which thread makes a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.attention.kv_bf16 import Bf16Pages
from llmc.targets.attention.kv_pages import Pages
from llmc.targets.attention.kv_plain import PlainPages
from llmc.targets.attention.kv_q4 import Q4Pages
from llmc.targets.attention.kv_q8 import Q8Pages
from llmc.targets.attention.kv_stream import ChunkStream
from llmc.targets.attention.scoring import Scoring
from llmc.targets.attention.sight import CHUNK, Sight
from llmc.targets.parallel import forget_registers
from llmc.targets.target import Target
from llmc.targets.vector import LANES, exp, f32, fma, greatest, held, i32, lanes, reduce_sum, registers, splat

HIDDEN = -1e30  # the score of a token a row may not see


def pages_of(target: Target, kind: str, size: int) -> Pages:
    """What reads and writes pages of a kind, of heads of this size."""
    if kind == "bf16":
        return Bf16Pages(target, size)
    return {"f32": PlainPages, "q8": Q8Pages, "q4": Q4Pages}[kind](size)


@dataclass(frozen=True)
class Block:
    """rows x heads query vectors that share a kv head, as `groups` of at most `most` that are multiplied at once."""

    rows: int
    heads: int
    most: int

    @property
    def groups(self) -> int:
        """How many groups."""
        return -(-self.rows * self.heads // self.most)

    @property
    def vectors(self) -> int:
        """Vectors in a group; those of the last may be more than there are."""
        return -(-self.rows * self.heads // self.groups)

    @property
    def room(self) -> int:
        """Vectors in all groups."""
        return self.groups * self.vectors


class Records:
    """What is known of each query vector after some tokens, in a buffer from `start` on.

    W sums of weights times values, sixteen sums of weights, and the greatest score, against which weights are,
    sixteen times.
    """

    def __init__(self, buffer: Any, start: Any, width: int) -> None:
        self.buffer, self.start, self.width = buffer, start, width

    @staticmethod
    def size(width: int) -> int:
        """Numbers of one record."""
        return width + 2 * LANES

    def at(self, vector: Any, column: Any) -> Any:
        """The index of sixteen numbers."""
        return lanes(self.start + vector * Records.size(self.width) + column)

    def get(self, vector: Any, column: Any) -> Any:
        """Sixteen numbers."""
        return self.buffer[self.at(vector, column)]

    def put(self, value: Any, vector: Any, column: Any) -> None:
        """Set sixteen numbers."""
        T.buffer_store(self.buffer, value, [self.at(vector, column)])

    def clear(self, vector: Any, sink: Any = None) -> None:
        """Nothing seen yet; a sink is a token that was seen before all others."""
        with T.serial(0, self.width // LANES + 1) as step:
            self.put(splat(f32(0)), vector, step * LANES)
        if sink is not None:
            T.buffer_store(self.buffer, f32(1), [self.start + vector * Records.size(self.width) + self.width])
        self.put(splat(f32(HIDDEN) if sink is None else sink), vector, self.width + LANES)

    def merge(self, other: Records, vector: Any, theirs: Any) -> None:
        """Take in another record, of tokens that come after those seen so far."""
        column = self.width + LANES
        tops = held(self.get(vector, column)), held(other.get(theirs, column))
        top = held(T.max(*tops))
        mine, new = (held(exp(one - top)) for one in tops)
        with T.serial(0, self.width // LANES + 1) as step:
            total = fma(self.get(vector, step * LANES), mine, other.get(theirs, step * LANES) * new)
            self.put(total, vector, step * LANES)
        self.put(top, vector, column)

    def finish(self, kv: Pages, vector: Any, out: Any, row: Any, start: Any) -> None:
        """The average of the values into out[row, start : start + D]."""
        x = registers((self.width,), "float32")
        with T.serial(0, self.width // LANES) as step:
            T.buffer_store(x, self.get(vector, step * LANES), [lanes(step * LANES)])
        kv.finish(x)
        inverse = registers((1,), "float32")
        T.buffer_store(inverse, f32(1) / reduce_sum(self.get(vector, self.width)), [0])
        with T.serial(0, kv.size) as d:
            T.buffer_store(out, x[d] * inverse[0], [row, start + d])


class Attending:
    """A block's query vectors, read once, and what is done with them a chunk at a time.

    How products are made is said by those after it: vector_products.py, tile_products.py.
    """

    usual: int  # query vectors of a block, if a row has fewer

    def __init__(
        self, target: Target, kv: Any, block: Block, sight: Sight, scoring: Scoring, count: Any, group: Any,
        first_head: Any,
    ) -> None:  # fmt: skip
        """`count` are the rows that there are, `group` is the kv head, `first_head` the first of the query heads."""
        self.target = target
        self.kv, self.block, self.sight, self.scoring, self.group = kv, block, sight, scoring, group
        self.first_head, self.slopes = first_head, scoring.table()
        self.count = count
        self.stream: ChunkStream | None = None
        self.queries = registers((block.room * kv.width,), "float32")
        self.pages = registers((2 * CHUNK,), "int32")  # of this chunk and of the next, looked up once
        self.indexes = registers((CHUNK,), "int32")
        self.scores = registers((CHUNK * block.room * LANES,), "float32")
        kv.prepare(block.room)

    @classmethod
    def block_of(cls, target: Target, rows: int, heads: int) -> Block:
        """A block of so many rows and heads."""
        raise NotImplementedError

    @property
    def ticks(self) -> int:
        """Turns of loops over products in a whole chunk."""
        raise NotImplementedError

    def score(self, many: Any) -> None:
        """Products of all vectors with the keys of the chunk's pages; V of these pages is fetched meanwhile."""
        raise NotImplementedError

    def mix(self, many: Any, to: Records, following: tuple[Any, Any]) -> None:
        """Weights times values, into the records; K of what is following is fetched meanwhile."""
        raise NotImplementedError

    def ask_in_order(self, share: Any, shares: int, number: Any, chunks: Any) -> None:
        """Ask for K and V by a `ChunkStream`. This is chunk `number` of a text's; `shares` tasks attend to it."""
        ticks = self.ticks + CHUNK * self.block.room
        self.stream = ChunkStream(self.kv, share, shares, ticks, number, chunks)

    @contextmanager
    def far(self) -> Iterator[None]:
        """What the body asks for, and a part of the stream; where that has brought this chunk, the stream alone."""
        if self.stream is None:
            yield
            return
        self.stream.ask(self.pages, CHUNK)
        with T.If(self.stream.begins), T.Then():
            yield

    def load(self, q: Any, row: Any) -> None:
        """Queries of q (M, ...) from a row on; where there are fewer rows than the block has, the last one's again."""
        with T.serial(0, self.block.room) as vector:
            r = T.min(T.floordiv(vector, self.block.heads), self.count - 1)
            head = self.first_head + T.floormod(vector, self.block.heads)
            self.kv.query(q, row + r, head * self.kv.size, self.queries, vector)

    def chunk(self, chunk: Any, to: Records, following: tuple[Any, Any] | None = None) -> None:
        """Records of one chunk. `following`: the kv head whose K comes next, and 0 if of this chunk, CHUNK of the next.

        By default it is the same head's of the next chunk.
        """
        first = registers((2,), "int32")
        T.buffer_store(first, T.max(chunk * CHUNK, self.sight.begin), [0])
        T.buffer_store(first, T.min((chunk + 1) * CHUNK, self.sight.end) - first[0], [1])
        self._look_up(first[0])
        self.score(first[1])
        forget_registers(self.target)
        self._weigh(first[1], to)
        forget_registers(self.target)
        self.mix(first[1], to, following or (self.group, CHUNK))

    def _look_up(self, first: Any) -> None:
        with T.serial(0, 2 * CHUNK) as i:
            index = self.sight.index(T.min(first + i, self.sight.end - 1))
            T.buffer_store(self.pages, self.sight.page(index), [i])
        with T.serial(0, CHUNK) as i:
            T.buffer_store(self.indexes, self.sight.index(first + i), [i])

    def place(self, page: Any, vector: Any) -> Any:
        """Where a page's scores of a vector begin."""
        return (page * self.block.room + vector) * LANES

    def _weigh(self, many: Any, to: Records) -> None:
        """Products -> weights against the chunk's greatest score; that and their sums into the records."""
        seen = registers((CHUNK * LANES,), "int32")  # of a row's tokens in each page; below 0 are those that it sees
        with T.serial(0, self.count) as r:
            with T.serial(0, many) as i:
                shown = T.Select(self.sight.shows(r, self.indexes[i]), splat(i32(-1)), splat(i32(0)))
                T.buffer_store(seen, shown, [lanes(i * LANES)])
            with T.serial(0, self.block.heads) as h:
                self._weigh_vector(many, to, r, h, seen)

    def _weigh_vector(self, many: Any, to: Records, r: Any, h: Any, seen: Any) -> None:
        """The same of one row's head.

        What grows stays in registers: of a maximum in memory LLVM makes a masked store, which is slow with AVX2 alone.
        """
        vector, found = r * self.block.heads + h, registers((2 * LANES,), "float32")
        top, total = lanes(0), lanes(LANES)
        T.buffer_store(found, splat(f32(HIDDEN)), [top])
        with T.serial(0, many) as i:
            place = lanes(self.place(i, vector))
            score = self.scoring.score(
                self.scores[place], self.first_head + h, self.slopes, self.sight.place(r, self.indexes[i])
            )
            score = held(T.Select(seen[lanes(i * LANES)] < splat(i32(0)), score, splat(f32(HIDDEN))))
            T.buffer_store(self.scores, score, [place])
            T.buffer_store(found, T.max(found[top], score), [top])
        T.buffer_store(found, greatest(found[top]), [top])
        T.buffer_store(found, splat(f32(0)), [total])
        with T.serial(0, many) as i:
            if self.stream is not None:
                self.stream.ask(self.pages, CHUNK)
            place = self.place(i, vector)
            score = self.scores[lanes(place)]
            weight = self.kv.exp(score - found[top])
            weight = held(self.kv.rounded(T.Select(score > splat(f32(HIDDEN)), weight, splat(f32(0)))))
            T.buffer_store(found, found[total] + weight, [total])
            self.kv.put_weights(weight, self.pages[i], self.group, self.scores, place)
        to.put(found[total], vector, to.width)
        to.put(found[top], vector, to.width + LANES)
