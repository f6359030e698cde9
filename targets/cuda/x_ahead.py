"""x of a block of many rows, which comes ahead into shared memory for products of four warps, 32 columns at a time.

Its image stands as tensor cores read it: eight rows by eight columns together, as a matrix of 128 bytes, all that there
are of eight rows side by side, and all rows of a block. One thread has it copied as a whole. Warps go on without each
other: a stage has two counts of arrivals, of what comes and of warps whose products with what came are done.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.image import SUMS, Image, block_words
from llmc.targets.cuda.launch import barrier, held, i32, shared
from llmc.targets.cuda.prelude import arrive, begin_arrivals, copy_whole, group_mma, wait_arrivals
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.stream import BLOCKS
from llmc.targets.cuda.target import WARP

MATRIX = WARP  # words of eight rows by eight columns
BEHIND = 2  # stages that are not on their way: warps may be at either


def stage_words(product: Product, eights: int) -> int:
    """Of so many eights of rows by 32 columns, and of the sums that come with the last columns of a slab."""
    return eights * (block_words(product) + product.form.offsets * SUMS)


class XAhead:
    """Stages for so many eights of rows, from word `first` of shared memory on."""

    def __init__(
        self, product: Product, image: Image, eights: int, stages: int, memory: Any, first: int, block: Any, thread: Any
    ) -> None:
        self.image, self.eights, self.stages, self.block, self.thread = image, eights, stages, block, thread
        self.memory, self.first, self.words = memory, first, stage_words(product, eights)
        self.parts, self.slabs = product.x_parts, product.slabs()
        self.there, self.done = shared((stages,), "uint64"), shared((stages,), "uint64")

    def prepare(self, warps: int) -> None:
        """Counts begin, for so many warps of the block."""
        with T.If(self.thread == 0), T.Then():
            for stage in range(self.stages):
                begin_arrivals(self.there[stage], 1)
                begin_arrivals(self.done[stage], warps)
        barrier()

    def begin(self) -> None:
        """Let the first columns come."""
        with T.If(self.thread == 0), T.Then():
            for index in range(min(self.stages - BEHIND, self.slabs * BLOCKS)):
                self._copy(i32(index // BLOCKS), index % BLOCKS)

    def next(self, slab: Any, block: int) -> None:
        """Block `block` of a slab is there, for tensor cores; another one comes in place of the last but one."""
        ahead = block + self.stages - BEHIND
        later, of = held(slab + ahead // BLOCKS, "int32"), ahead % BLOCKS
        with T.If(tirx.all(self.thread == 0, later < self.slabs)), T.Then():
            index = later * BLOCKS + of
            wait_arrivals(self.done[self._stage(index)], T.floordiv(index, self.stages) + 1)
            self._copy(later, of)
        index = held(slab * BLOCKS + block, "int32")
        self.stage = held(self._stage(index), "int32")
        wait_arrivals(self.there[self.stage], T.floordiv(index, self.stages))

    def release(self, slab: Any, block: int) -> None:
        """The warp's products with a block are done."""
        with T.If(T.floormod(self.thread, WARP) == 0), T.Then():
            arrive(self.done[self._stage(slab * BLOCKS + block)])

    def _stage(self, index: Any) -> Any:
        return T.floormod(index, self.stages)

    def _copy(self, slab: Any, block: int) -> None:
        """32 columns begin to come."""
        stage = self._stage(slab * BLOCKS + block)
        given = self.image.data[self.image.apart(self.block, slab, block, self.eights)]
        words = self.words if block == BLOCKS - 1 else self.eights * self.image.block_words
        copy_whole(self.memory[self.first + stage * self.words], given, 4 * words, self.there[stage])

    def multiply(self, sums: Any, a: Any, step: int, part: int, begun: int) -> None:
        """sums += weights by one of the two products of these columns, by one part of x; `begun` 0: from zero."""
        offset = (step * self.parts + part) * 2 * MATRIX
        self._multiply(sums, a, offset, self.image.block_words, begun)

    def multiply_sums(self, sums: Any, a: Any, at: int) -> None:
        """sums += stored offsets of a slab by sums of x, of which its last columns have brought some of each lane's."""
        self._multiply(sums, a, self.eights * (self.image.block_words + at * SUMS), SUMS, 1)

    def _multiply(self, sums: Any, a: Any, offset: int, step: int, begun: int) -> None:
        stage = self.memory[self.first + self.stage * self.words]
        group_mma(self.eights * ROWS, sums, a, stage, 4 * offset, 4 * step, begun)
