"""Products of a warp on CUDA: some tiles of packed weights by some eights of rows of x, 128 columns at a time.

Of block formats products are of whole numbers and x: a sum over columns that share a scale is multiplied with that.
Stored offsets are weights of columns of their own, one for a block, whose x is the sum of the block's x. That sum is a
product too, of x and ones, so made that lane 4 g + q has the sum of row g over the q-th block, as it has the block's
offset. Offset and sum are two parts of bfloat16 each, and all four products of their parts are one of tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.fragments import low, products
from llmc.targets.cuda.launch import barrier, f32, fill, fma, held, local, shared, u32
from llmc.targets.cuda.operands import STEPS, Operands
from llmc.targets.cuda.prelude import bf16_pair, mma
from llmc.targets.cuda.stream import BLOCKS, Words

ROWS = 8  # of x that one product takes
_ONES = 0x3F803F80
Take = Callable[[Any], Any]  # an eight of rows -> the lane's words of it


class Slab:
    """Sums of a warp: `rows` eights of rows by `tiles` tiles, four of a lane for each of both."""

    def __init__(self, operands: Operands, rows: int, tiles: int, x_parts: int, sums: Any) -> None:
        self.operands, self.rows, self.tiles = operands, rows, tiles
        self.x_parts, self.sums = x_parts, sums
        self.a = local((tiles * STEPS * operands.parts * 4,), "uint32")
        self.b = local((rows * x_parts * 2,), "uint32")
        self.partial = local((rows * tiles * 4,)) if operands.run else sums

    def begin(self, words: Sequence[Words]) -> None:
        """Read 128 columns, of each tile."""
        self.weights = [self.operands.slab(each) for each in words]

    def block(self, block: int) -> None:
        """Make operands of 32 of these columns."""
        for own, weights in enumerate(self.weights):
            words = [word for step in weights.words(block) for part in step for word in part]
            for i, word in enumerate(words):
                T.buffer_store(self.a, word, [own * len(words) + i])

    def take(self, n: Any, words: list[Any]) -> None:
        """The lane's words of eight rows of x for the next product."""
        for i, word in enumerate(words):
            T.buffer_store(self.b, word, [n * len(words) + i])

    def multiply(self, step: int) -> None:
        """Add product `step` of the slab, and what its run comes to where it ends one."""
        run, parts = self.operands.run, self.operands.parts
        if run and step % run == 0:
            fill(self.partial, f32(0))
        for i, j in products(parts, self.x_parts):  # neighbours add to other sums: none waits for the one before
            with T.unroll(0, self.rows) as n:
                for own in range(self.tiles):
                    a, b = ((own * STEPS + step % STEPS) * parts + i) * 4, (n * self.x_parts + j) * 2
                    mma(self.partial[(n * self.tiles + own) * 4], self.a[a], self.b[b])
        if run and (step + 1) % run == 0:
            scales = [weights.scale(step) for weights in self.weights]
            with T.unroll(0, self.rows) as n:
                for own in range(self.tiles):
                    for i in range(4):
                        at = (n * self.tiles + own) * 4 + i
                        T.buffer_store(self.sums, fma(scales[own][i // 2], self.partial[at], self.sums[at]), [at])

    def add_offsets(self, take: Callable[[Any, int], Any]) -> None:
        """Add products of stored offsets with sums of x: `take(eight rows, which of a lane's)` gives those, in parts."""
        for at in range(self.operands.offsets):
            a, b = local((self.tiles * 4,), "uint32"), local((2,), "uint32")
            for own, weights in enumerate(self.weights):
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
    """Sums of x over the blocks of a slab that have an offset, of `rows` eights of rows; none where there are none."""

    def __init__(self, operands: Operands, rows: int) -> None:
        self.count, self.rows = operands.offsets, rows
        if not self.count:
            return
        self.totals = local((rows * self.count * 4,))
        self.x, self.ones = local((4,), "uint32"), local((2 * BLOCKS,), "uint32")
        fill(self.x, u32(0))
        for block in range(BLOCKS):  # ones are column 2 q of the product, so that their sums are q's
            for i in range(2):
                T.buffer_store(self.ones, T.Select(operands.first == 2 * block, u32(_ONES), u32(0)), [2 * block + i])

    def begin(self) -> None:
        """A slab's are sums from zero."""
        if self.count:
            fill(self.totals, f32(0))

    def add(self, n: Any, block: int, step: int, words: list[Any]) -> None:
        """What a product of 16 columns is made of."""
        if not self.count:
            return
        for part in reversed(range(len(words) // 2)):
            for i in range(2):
                T.buffer_store(self.x, words[2 * part + i], [2 * i])
            mma(self.totals[(n * self.count + step % self.count) * 4], self.x[0], self.ones[2 * block])

    def pair(self, n: Any, at: int) -> Any:
        """The sum of row g over the lane's own block, as two parts."""
        total = self.totals[(n * self.count + at) * 4]
        large = held(low(held(bf16_pair(total, f32(0)), "uint32")))
        return bf16_pair(large, total - large)


class SharedSums:
    """The same of rows that all warps of a block share: each makes some, and all read them."""

    def __init__(self, operands: Operands, rows: int, warps: int, warp: Any, lane: Any) -> None:
        self.own = BlockSums(operands, rows // warps)
        self.first, self.lane = warp * (rows // warps), lane
        if self.own.count:
            self.pairs = shared((rows, self.own.count, 32), "uint32")

    def add(self, block: int, step: int, take: Callable[[Any], list[Any]]) -> None:
        """What `take(eight rows)` gives of the warp's rows."""
        if self.own.count:
            for n in range(self.own.rows):
                self.own.add(n, block, step, take(self.first + n))

    def share(self) -> None:
        """Let all warps see the sums of a slab."""
        if not self.own.count:
            return
        for n in range(self.own.rows):
            for at in range(self.own.count):
                T.buffer_store(self.pairs, self.own.pair(n, at), [self.first + n, at, self.lane])
        barrier()

    def pair(self, n: Any, at: int) -> Any:
        """The sum of row g of an eight over the lane's own block, as two parts."""
        return self.pairs[n, at, self.lane]
