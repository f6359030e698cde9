"""Products of a batch on CUDA where tensor cores take operands of four warps (`wgmma`): a strand of x stays in a block.

A block makes operands of x out of one strand's columns once, in shared memory, and multiplies one group of outputs after
another with them: sixteen tiles, one a warp, whose weights come ahead in a ring that goes on over its tiles. So x is
read once by a block, and not once by each that has other outputs. What strands sum goes to memory of the step, and a
launch of its own adds it in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.cuda.image import block_words
from llmc.targets.cuda.launch import after_launches, barrier, dynamic, f32, fill, held, launch, local, together
from llmc.targets.cuda.operands import STEPS, Coded, Operands
from llmc.targets.cuda.prelude import arrive_last, group_mma, share_with_tensor_cores, wait_copies
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.slab import BlockSums, Slab
from llmc.targets.cuda.stream import BLOCK, BLOCKS, SLAB, Ring, Stream, Words
from llmc.targets.cuda.target import WARP, CudaTarget
from llmc.targets.cuda.warpgroups import WordsAhead, multiply_codes, multiply_numbers

import os
ARRIVE = bool(os.environ.get("ARRIVE"))
WARPS = 16  # of a block: four groups
THREADS = WARPS * WARP
MATRIX = WARP  # words of eight rows by eight columns, as they stand for tensor cores
MERGING = 256  # threads of a block that adds strands
_AHEAD = 60 << 10  # bytes of weights that should be on their way to a multiprocessor
_MOST_STAGES = 10
_RESERVED = 1 << 10  # bytes of shared memory that a block takes beside its own


@dataclass(frozen=True)
class Size:
    """Of a block: rows of x by eights, slabs of x that are there together, and slabs of weights of a warp."""

    rows: int
    slabs: int
    stages: int

    def eight(self, product: Product) -> int:
        """Words of shared memory that operands of eight rows take."""
        return self.slabs * BLOCKS * block_words(product)

    def words(self, product: Product) -> int:
        """Of shared memory."""
        sums = self.rows * self.slabs * product.form.offsets * WARP
        return self.ring(product) + self.rows * self.eight(product) + sums

    def ring(self, product: Product) -> int:
        """Of it, what weights take."""
        return WARPS * self.stages * Stream.words(product.pieces(), 1)


def fitted(target: CudaTarget, product: Product, rows: int) -> Size | None:
    """A size for so many eights of rows: a whole strand of x, or a part that leaves room for weights on their way."""
    if not target.wgmma or product.form.parts > 1:
        return None
    room = target.shared_bytes - product.form.value_bytes - _RESERVED
    stage = 4 * Size(rows, 0, 1).words(product)
    for chunks in range(1, product.run() + 1):
        slabs = -(-product.run() // chunks)
        stages = min((room - 4 * Size(rows, slabs, 0).words(product)) // stage, _MOST_STAGES)
        if stages >= 2 and (stages - 1) * stage >= _AHEAD:
            return Size(rows, slabs, stages)
    return None


def meeting(product: Product, rows: int, most: int) -> Any:
    """Memory of the step in which strands meet, for blocks of so many eights of rows, and `most` rows in all."""
    eights = T.floordiv(product.out.shape[0] + (rows * ROWS - 1), rows * ROWS) * rows
    shape = (product.strands(), T.min(eights, most // ROWS), tiles(product.width), 4 * WARP)
    return T.alloc_buffer(shape)


def multiply_batch(target: CudaTarget, product: Product, size: Size, found: Any) -> None:
    """Both launches, between which strands are in `found`."""
    rows = T.floordiv(product.out.shape[0] + (size.rows * ROWS - 1), size.rows * ROWS)
    _multiply(target, product, size, found, rows)
    if not ARRIVE:
        _add_strands(product, size, found, rows)


def _multiply(target: CudaTarget, product: Product, size: Size, found: Any, rows: Any) -> None:
    strands, groups = product.strands(), -(-tiles(product.width) // WARPS)
    step = min(groups, max(target.multiprocessors // strands, 1))  # blocks of a strand
    grid = {"blockIdx.x": strands * step, "blockIdx.y": rows, "threadIdx.x": THREADS}
    with launch(grid, waits=False) as (block, of_rows, thread), together(1):
        operands = Operands(product.form, thread, THREADS)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        strand, group = T.floormod(block, strands), T.floordiv(block, strands)
        first, slabs = strand * product.run(), held(product.slabs_of(strand), "int32")
        turns = T.floordiv(groups - 1 - group, step) + 1
        memory, pieces = dynamic(size.words(product), product.form.value_bytes), product.pieces()
        ring = _Ring(product, memory, warp * size.stages * Stream.words(pieces, 1), size.stages, lane)
        x = _Strand(product, operands, size, memory, thread)
        ring.begin(group * WARPS + warp, step * WARPS, turns, first, slabs)
        after_launches()
        sums = local((size.rows * 4,))
        slab = Slab(operands, size.rows, 1, product.x_parts, sums)
        chunks = -(-product.run() // size.slabs)
        ahead = WordsAhead(operands, Words(pieces, product.weight, 0, first))
        if chunks == 1:
            x.make(of_rows, first, slabs)
        if product.form.blocks is not None:
            ahead.load(ring.next())
        with T.serial(0, turns, unroll=False) as turn:
            fill(sums, f32(0))
            with T.serial(0, chunks, unroll=False) as chunk:
                own = T.min(slabs - chunk * size.slabs, size.slabs)
                if chunks > 1:
                    barrier()
                    x.make(of_rows, first + chunk * size.slabs, own)
                with T.serial(0, own, unroll=False) as i:
                    x.begin(i)
                    if product.form.blocks is None:
                        multiply_numbers(slab, operands.slab(ring.next()), x, i)
                    else:
                        index = held(first + chunk * size.slabs + i, "int32")
                        weights = ahead.take(Words(pieces, product.weight, 0, index))
                        slab.weights = [weights]
                        multiply_codes(slab, weights, x, i, lambda: ahead.load(ring.next()))
                        slab.add_offsets(x.sum)
            tile = (group + turn * step) * WARPS + warp
            with T.If(tile < tiles(product.width)), T.Then():
                for n in range(size.rows):
                    four = sums[T.ramp(4 * n, 1, 4)]
                    T.buffer_store(found, four, [strand, of_rows * size.rows + n, tile, T.ramp(lane * 4, 1, 4)])
                if ARRIVE:
                    last = local((1,), "bool")
                    T.buffer_store(last, arrive_last(of_rows * tiles(product.width) + tile, strands), [0])
                    with T.If(last[0]), T.Then(), T.unroll(0, size.rows) as n:
                        _add(product, found, of_rows * size.rows + n, tile, lane)
        wait_copies(0)


class _Ring(Ring):
    """That of a warp, of which the last tiles may be beyond the matrix's: then it has the last one."""

    def __init__(self, product: Product, memory: Any, first: Any, stages: int, lane: Any) -> None:
        super().__init__(product.pieces(), product.weight, memory, first, stages, lane)
        self.last = tiles(product.width) - 1
        self.taken = local((1,), "int32")
        T.buffer_store(self.taken, 0, [0])

    def _tile(self, state: Any) -> Any:
        return T.min(super()._tile(state), self.last)

    def _go_on(self, state: Any) -> None:
        """Not behind the last slab: it may be read once more, and what is read is not used."""
        if state is self.ahead:
            super()._go_on(state)
            return
        T.buffer_store(self.taken, self.taken[0] + 1, [0])
        with T.If(self.taken[0] < self.left), T.Then():
            super()._go_on(state)


class _Strand:
    """x of a block of rows and some slabs in shared memory, as tensor cores read it: behind the ring of weights.

    Eight rows by eight columns stand together, as a matrix of 128 bytes, and all that there are of eight rows.
    """

    def __init__(self, product: Product, operands: Operands, size: Size, memory: Any, thread: Any) -> None:
        self.product, self.operands, self.size, self.memory = product, operands, size, memory
        self.warp, self.lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        self.words, self.eight = block_words(product) // STEPS // WARP, size.eight(product)
        self.first = size.ring(product)
        self.sums = self.first + size.rows * self.eight
        self.together = BLOCKS  # blocks of columns of numbers whose products are on their way at once

    def make(self, of_rows: Any, slab: Any, count: Any) -> None:
        """Of `count` slabs from `slab` on: a warp for 128 columns of eight rows, of some of which it reads x at once."""
        turns = -(-self.size.slabs * self.size.rows // WARPS)
        several = 2 if turns % 2 == 0 else 1
        with T.If(count > 0), T.Then(), T.serial(0, turns // several, unroll=False) as turn:
            found = [self._read(of_rows, slab, count, turn * several + at) for at in range(several)]
            for each in found:
                self._write(*each, count)
        share_with_tensor_cores()
        barrier()

    def _read(self, of_rows: Any, slab: Any, count: Any, turn: Any) -> tuple[Any, Any, list[list[list[Any]]]]:
        """The warp's eight rows and slab of a turn, and what is multiplied with its blocks."""
        unit, rows = held(turn * WARPS + self.warp, "int32"), self.size.rows
        n, own = unit % rows, T.floordiv(unit, rows)
        row = (of_rows * rows + n) * ROWS + self.operands.first
        first = (slab + T.min(own, count - 1)) * SLAB
        return n, own, [self.product.words(row, first + of * BLOCK, self.operands) for of in range(BLOCKS)]

    def _write(self, n: Any, own: Any, blocks: list[list[list[Any]]], count: Any) -> None:
        """It, if that slab is there."""
        sums = BlockSums(self.operands, 1)
        sums.begin()
        for of, words in enumerate(blocks):
            sums.add(0, of, words)
        with T.If(own < count), T.Then():
            for of, words in enumerate(blocks):
                for step in range(STEPS):
                    for at, word in enumerate(words[step]):
                        place = (own * BLOCKS + of) * block_words(self.product) + (step * self.words + at) * WARP
                        T.buffer_store(self.memory, word, [self.first + n * self.eight + place + self.lane])
            for at in range(self.product.form.offsets):
                T.buffer_store(self.memory, sums.pair(0, at), [self._sum(n, own, at)])

    def _sum(self, n: Any, slab: Any, at: int) -> Any:
        return self.sums + ((n * self.size.slabs + slab) * self.product.form.offsets + at) * WARP + self.lane

    def begin(self, slab: Any) -> None:
        """Slab `slab` of those that are there is the next one."""
        self.slab, self.stage = slab, held(self.first + slab * BLOCKS * block_words(self.product), "int32")

    def next(self, slab: Any, block: int) -> None:
        """All blocks of columns are there."""

    def multiply(self, sums: Any, a: Any, block: int, step: int, part: int, begun: Any) -> None:
        """sums += weights by one of the two products of a block, by one part of x; `begun` 0: sums from zero."""
        place = ((block * STEPS + step) * self.product.x_parts + part) * 2 * MATRIX
        group_mma(self.size.rows * ROWS, sums, a, self.memory[self.stage], place, 4 * self.eight, begun)

    def sum(self, n: Any, at: int) -> Any:
        """Of row g of eight, the sum over the lane's own block, as two parts."""
        return held(self.memory[self._sum(n, self.slab, at)], "uint32")


def _add_strands(product: Product, size: Size, found: Any, rows: Any) -> None:
    """A launch that adds what strands found of each number, in their order: as lanes have it, four numbers a thread."""
    count = tiles(product.width) * size.rows * WARP
    grid = {"blockIdx.x": -(-count // MERGING), "blockIdx.y": rows, "threadIdx.x": MERGING}
    with launch(grid) as (block, of_rows, thread):
        place = block * MERGING + thread
        lane, eight = T.floormod(place, WARP), T.floormod(T.floordiv(place, WARP), size.rows)
        eight, tile = of_rows * size.rows + eight, T.floordiv(place, WARP * size.rows)
        with T.If(place < count), T.Then():
            _add(product, found, eight, tile, lane)


def _add(product: Product, found: Any, eight: Any, tile: Any, lane: Any) -> None:
    """What strands found of a lane's four numbers of eight rows of a tile, in their order."""
    row = eight * ROWS + lane % 4 * 2
    with T.If(row < product.out.shape[0]), T.Then():
        total, one = local((4,)), local((4 * product.strands(),))
        fill(total, f32(0))
        for strand in range(product.strands()):
            four = found[strand, eight, tile, T.ramp(lane * 4, 1, 4)]
            T.buffer_store(one, four, [T.ramp(4 * strand, 1, 4)])
        for strand in range(product.strands()):
            for i in range(4):
                T.buffer_store(total, total[i] + one[4 * strand + i], [i])
        for i in range(4):
            output = tile * TILE + T.floordiv(lane, 4) + i // 2 * 8
            with T.If(tirx.all(row + i % 2 < product.out.shape[0], output < product.width)), T.Then():
                T.buffer_store(product.out, total[i], [row + i % 2, output])
