"""Products of a warp on CUDA: some tiles of packed weights by some eights of rows of x, 128 columns at a time.

Of block formats products are of whole numbers and x: a sum over columns that share a scale is multiplied with that.
Stored offsets are weights of columns of their own, one for a block, whose x is the sum of the block's x. Lane
4 g + q has the sum of row g over the q-th block, as it has the block's offset. Offset and sum are two parts of bfloat16
each, and all four products of their parts are one of tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.fragments import high, low, products
from llmc.targets.cuda.launch import added, f32, fill, fma, held, local, warp_reduce
from llmc.targets.cuda.operands import STEPS, Coded, Operands
from llmc.targets.cuda.prelude import bf16_pair, mma
from llmc.targets.cuda.stream import Words

TOGETHER = 2  # eights of rows whose products wait for their scale
Take = Callable[[Any, int], list[Any]]  # an eight of rows, and one of the two products of a block -> the lane's words


class Slab:
    """Sums of a warp: `rows` eights of rows by `tiles` tiles, four of a lane for each of both."""

    def __init__(self, operands: Operands, rows: int, tiles: int, x_parts: int, sums: Any) -> None:
        self.operands, self.rows, self.tiles = operands, rows, tiles
        self.x_parts, self.sums = x_parts, sums
        self.together = min(rows, TOGETHER)
        self.a = local((tiles * STEPS * operands.form.parts * 4,), "uint32")
        self.b = local((self.together * x_parts * 2,), "uint32")
        self.partial = local((self.together * tiles * 4,)) if operands.form.run else None

    def begin(self, words: Sequence[Words]) -> None:
        """Read 128 columns, of each tile."""
        self.weights = [self.operands.slab(each) for each in words]

    def multiply(self, block: int, take: Take) -> None:
        """Add the products of 32 of these columns; `take(eight rows, step)` gives the lane's words of x."""
        for own, weights in enumerate(self.weights):
            words = [word for step in weights.words(block) for part in step for word in part]
            for i, word in enumerate(words):
                T.buffer_store(self.a, word, [own * len(words) + i])
        run = self.operands.form.run
        scales = {
            step: [weights.scale(block * STEPS + step) for weights in self.weights if isinstance(weights, Coded)]
            for step in range(STEPS)
            if run and (step + 1) % run == 0
        }
        if self.rows == self.together:
            self._group(0, take, scales)
            return
        with T.unroll(0, self.rows // self.together) as group:
            self._group(group, take, scales)

    def _group(self, group: Any, take: Take, scales: dict[int, list[Any]]) -> None:
        """The products of some eights of rows, by both steps, each scaled where its run ends."""
        for step in range(STEPS):
            if self.partial is not None and step % self.operands.form.run == 0:
                fill(self.partial, f32(0))
            self._products(group, step, take)
            if step in scales:
                self._scale(group, scales[step])

    def _products(self, group: Any, step: int, take: Take) -> None:
        first = group * self.together
        for n in range(self.together):
            for i, word in enumerate(take(first + n, step)):
                T.buffer_store(self.b, word, [n * self.x_parts * 2 + i])
        sums, begin = (self.sums, first) if self.partial is None else (self.partial, 0)
        for i, j in products(self.operands.form.parts, self.x_parts):  # neighbours add to other sums: none waits
            for n in range(self.together):
                for own in range(self.tiles):
                    a, b = ((own * STEPS + step) * self.operands.form.parts + i) * 4, (n * self.x_parts + j) * 2
                    mma(sums[((begin + n) * self.tiles + own) * 4], self.a[a], self.b[b])

    def _scale(self, group: Any, scales: list[Any]) -> None:
        """Add what a run of products comes to."""
        assert self.partial is not None
        count = self.together * self.tiles * 4
        for i in range(count):
            at, scale = group * count + i, scales[i // 4 % self.tiles][i // 2 % 2]
            T.buffer_store(self.sums, fma(scale, self.partial[i], self.sums[at]), [at])

    def add_offsets(self, take: Callable[[Any, int], Any]) -> None:
        """Add products of stored offsets and sums of x; `take(eight rows, which of a lane's)` gives these, in parts."""
        for at in range(self.operands.form.offsets):
            a, b = local((self.tiles * 4,), "uint32"), local((2,), "uint32")
            for own, weights in enumerate(self.weights):
                assert isinstance(weights, Coded)
                for half, offset in enumerate(weights.offsets(at)):
                    T.buffer_store(a, bf16_pair(offset, offset), [own * 4 + half])
                    rest = held(offset - low(a[own * 4 + half]))
                    T.buffer_store(a, bf16_pair(rest, rest), [own * 4 + half + 2])
            with T.unroll(0, self.rows) as n:
                for i in range(2):
                    T.buffer_store(b, take(n, at), [i])
                for own in range(self.tiles):
                    mma(self.sums[(n * self.tiles + own) * 4], a[own * 4], b[0])


class BlockSums:
    """Sums of x over the blocks of a slab that have an offset, of `rows` eights of rows; none where there are none.

    In float32, in one order for all launches: of a lane's four columns of a product, of its products where they share
    an offset, of the four lanes of a row.
    """

    def __init__(self, operands: Operands, rows: int) -> None:
        self.count, self.quarter = operands.form.offsets, operands.quarter
        if self.count:
            self.totals = local((rows * self.count,))

    def begin(self) -> None:
        """A slab's are sums from zero."""
        if self.count:
            fill(self.totals, f32(0))

    def add(self, n: Any, block: int, words: list[list[Any]]) -> None:
        """What a block's products are made of; lane q keeps the sum over the q-th block of a slab."""
        for at, total in enumerate(self.of_block(words)):
            kept = T.Select(self.quarter == block, total, self.totals[n * self.count + at])
            T.buffer_store(self.totals, kept, [n * self.count + at])

    def of_block(self, words: list[list[Any]]) -> list[Any]:
        """The sums of a block's columns by offsets, in all four lanes of a row."""
        if not self.count:
            return []
        found = local((1,))
        products = [_four(step) for step in words]
        totals = products if self.count == STEPS else [products[0] + products[1]]
        for at, total in enumerate(totals):
            T.buffer_store(found, total, [0])
            warp_reduce(found, 0, added, lanes=4)
            totals[at] = held(found[0])
        return totals

    def pair(self, n: Any, at: int) -> Any:
        """The sum of row g over the lane's own block, as two parts."""
        return two_parts(self.totals[n * self.count + at])


def two_parts(number: Any) -> Any:
    """A float32 as a pair of bfloat16: the nearest, and the nearest to what is left."""
    large = held(low(held(bf16_pair(number, f32(0)), "uint32")))
    return bf16_pair(large, number - large)


def _four(words: list[Any]) -> Any:
    """The sum of the four columns whose parts a lane has."""
    columns = []
    for half in range(2):
        parts = [unpack(word) for word in words[half::2] for unpack in (low, high)]
        columns += [held(parts[at] + parts[at + 2] if len(parts) > 2 else parts[at]) for at in range(2)]
    return held((columns[0] + columns[1]) + (columns[2] + columns[3]))
