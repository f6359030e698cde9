"""x of a batch as tensor cores read it in products of four warps, in shared memory, and these products of a slab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.image import block_words
from llmc.targets.cuda.launch import barrier, fma, held, i32, local
from llmc.targets.cuda.operands import STEPS, Coded, Operands
from llmc.targets.cuda.prelude import (
    begin_group_products,
    commit_group_products,
    group_mma,
    share_with_tensor_cores,
    wait_group_products,
)
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.ring import Room
from llmc.targets.cuda.slab import BlockSums, Slab
from llmc.targets.cuda.stream import BLOCK, BLOCKS, SLAB
from llmc.targets.cuda.target import WARP

MATRIX = WARP  # words of eight rows by eight columns, as they stand for tensor cores


@dataclass(frozen=True)
class Size:
    """Of a block: rows of x by eights, slabs of x that are there together, slabs of weights of a warp, and warps."""

    rows: int
    slabs: int
    stages: int
    warps: int = 16  # four products at once, each of four

    def chunks(self, product: Product) -> int:
        """In how many parts a strand of x comes."""
        return -(-product.run() // self.slabs)

    def eight(self, product: Product) -> int:
        """Words of shared memory that operands of eight rows take."""
        return self.slabs * BLOCKS * block_words(product)

    @property
    def room(self) -> Room:
        """Of a warp's weights."""
        return Room(1, self.stages)

    def ring(self, product: Product) -> int:
        """What weights take."""
        return self.warps * self.room.words(product.pieces())

    def words(self, product: Product) -> int:
        """All of it."""
        sums = self.rows * self.slabs * product.form.offsets * WARP
        return self.ring(product) + self.rows * self.eight(product) + sums


class Rows:
    """x of a block's rows and some slabs, behind the ring of weights.

    Eight rows by eight columns stand together, as a matrix of 128 bytes, and all that there are of eight rows. Sums
    over blocks of columns are behind them, where weights have stored offsets.
    """

    def __init__(
        self, product: Product, operands: Operands, size: Size, memory: Any, of_rows: Any, thread: Any
    ) -> None:  # fmt: skip
        self.product, self.operands, self.size, self.memory = product, operands, size, memory
        self.of_rows, self.warp, self.lane = of_rows, T.floordiv(thread, WARP), T.floormod(thread, WARP)
        self.eight, self.first = size.eight(product), size.ring(product)
        self.sums = self.first + size.rows * self.eight

    def make(self, slab: Any, count: Any) -> None:
        """Of `count` slabs from `slab` on: a warp for 128 columns of eight rows, of two of which it reads x at once."""
        turns = -(-self.size.slabs * self.size.rows // self.size.warps)
        several = 2 if turns % 2 == 0 else 1
        with T.If(count > 0), T.Then(), T.serial(0, turns // several, unroll=False) as turn:
            found = [self._read(slab, count, turn * several + at) for at in range(several)]
            for each in found:
                self._write(*each, count)
        share_with_tensor_cores()
        barrier()

    def _read(self, slab: Any, count: Any, turn: Any) -> tuple[Any, Any, list[list[list[Any]]]]:
        """Which eight rows and which slab are the warp's in a turn, and what products of its blocks are made of."""
        unit, rows = held(turn * self.size.warps + self.warp, "int32"), self.size.rows
        n, own = unit % rows, T.floordiv(unit, rows)
        row = (self.of_rows * rows + n) * ROWS + self.operands.first
        first = (slab + T.min(own, count - 1)) * SLAB
        return n, own, [self.product.words(row, first + of * BLOCK, self.operands) for of in range(BLOCKS)]

    def _write(self, n: Any, own: Any, blocks: list[list[list[Any]]], count: Any) -> None:
        """That, if the slab is there."""
        sums = BlockSums(self.operands, 1)
        sums.begin()
        for of, words in enumerate(blocks):
            sums.add(0, of, words)
        with T.If(own < count), T.Then():
            for of, words in enumerate(blocks):
                first = self.first + n * self.eight + (own * BLOCKS + of) * block_words(self.product) + self.lane
                for at, word in enumerate(word for step in words for word in step):
                    T.buffer_store(self.memory, word, [first + at * WARP])
            for at in range(self.product.form.offsets):
                T.buffer_store(self.memory, sums.pair(0, at), [self._sum(n, own, at)])

    def _sum(self, n: Any, slab: Any, at: int) -> Any:
        return self.sums + ((n * self.size.slabs + slab) * self.product.form.offsets + at) * WARP + self.lane

    def begin(self, slab: Any) -> None:
        """Slab `slab` of those that are there is what is multiplied."""
        self.slab, self.stage = slab, held(self.first + slab * BLOCKS * block_words(self.product), "int32")

    def multiply(self, sums: Any, a: Any, block: int, step: int, part: int, begun: bool) -> None:
        """sums += weights by one of the two products of a block, by one part of x; not `begun`: sums from zero."""
        place = ((block * STEPS + step) * self.product.x_parts + part) * 2 * MATRIX
        group_mma(self.size.rows * ROWS, sums, a, self.memory[self.stage], 4 * place, 4 * self.eight, i32(begun))

    def sum(self, n: Any, at: int) -> Any:
        """Of row g of eight, the sum over the lane's own block, as two parts."""
        return held(self.memory[self._sum(n, self.slab, at)], "uint32")


def multiply_codes(slab: Slab, weights: Coded, x: Rows) -> None:
    """A slab of codes: sums of a run of products wait for its scale, those of two runs by turns."""
    run, rows = slab.operands.form.run, slab.rows * ROWS
    partial = [local((slab.rows * 4,)) for _ in range(2)]
    a = [local((run * 4,), "uint32") for _ in range(2)]

    def settle(last: int, left: int) -> None:
        """Scale the run that ends with step `last`; so many others are on their way."""
        own = last // run % 2
        wait_group_products(left, partial[own], rows)
        scales = weights.scale(last)
        for i in range(slab.rows * 4):
            T.buffer_store(slab.sums, fma(scales[i // 2 % 2], partial[own][i], slab.sums[i]), [i])

    for first in range(0, BLOCKS * STEPS, run):
        own, block = first // run % 2, first // STEPS
        if first % STEPS == 0:
            words = weights.words(block)
        for i, word in enumerate(word for step in words[first % STEPS :][:run] for word in step[0]):
            T.buffer_store(a[own], word, [i])
        begin_group_products(a[own], run * 4)
        for step in range(run):
            for part in reversed(range(slab.x_parts)):
                begun = step > 0 or part < slab.x_parts - 1
                x.multiply(partial[own], a[own][step * 4], block, first % STEPS + step, part, begun)
        commit_group_products()
        if first:
            settle(first - 1, 1)
    settle(BLOCKS * STEPS - 1, 0)
