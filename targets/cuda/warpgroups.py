"""Products of many rows on CUDA where tensor cores take operands of four warps at once (`wgmma`).

A group of four warps multiplies 64 outputs, a tile of each warp, with all rows of a block: weights out of registers, as
`mma` has them (operands.py), x out of shared memory, where it comes ahead. While tensor cores multiply, warps make the
next weights, and multiply the sums before with their scales. Words of weights are read a slab ahead.

A warp goes over one strand after another, and has what it has summed of those before in shared memory (prefill.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.cuda.image import Image, block_words
from llmc.targets.cuda.launch import (
    after_launches,
    barrier,
    dynamic,
    f32,
    fill,
    fma,
    held,
    i32,
    launch,
    local,
    shared,
    together,
)
from llmc.targets.cuda.operands import STEPS, Coded, Operands, Plain
from llmc.targets.cuda.prefill import Totals
from llmc.targets.cuda.prelude import (
    arrive,
    begin_arrivals,
    begin_group_products,
    commit_group_products,
    copy_whole,
    group_mma,
    load,
    wait_arrivals,
    wait_group_products,
)
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.slab import Slab
from llmc.targets.cuda.stream import BLOCKS, Words
from llmc.targets.cuda.target import WARP, CudaTarget

WARPS = 8  # of a block: two groups
THREADS = WARPS * WARP
MATRIX = WARP  # words of eight rows by eight columns, as they stand for tensor cores


@dataclass(frozen=True)
class Size:
    """Of a block: rows of x by eights, and how many blocks of 32 columns of x have room."""

    rows: int
    stages: int

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.rows * 4

    def words(self, product: Product) -> int:
        """Of shared memory."""
        return THREADS * self.sums + self.stages * self.rows * block_words(product)


def fitted(target: CudaTarget, product: Product) -> Size | None:
    """The size that fits a multiprocessor; None where tensor cores take no such operands, or weights have two parts."""
    if not target.wgmma or product.form.parts > 1:
        return None
    rows = 16 if product.form.run else 32  # unscaled sums take twice as many registers as sums do
    sizes = (Size(rows, stages) for stages in (8, 6, 4))
    room = target.shared_bytes - product.form.value_bytes - 16 * 8
    return next((size for size in sizes if 4 * size.words(product) <= room), None)


def multiply_most(product: Product, image: Image, size: Size) -> None:
    """The launch."""
    rows = size.rows * ROWS
    grid = {
        "blockIdx.x": T.floordiv(product.out.shape[0] + (rows - 1), rows),
        "blockIdx.y": -(-product.width // (WARPS * TILE)),
        "threadIdx.x": THREADS,
    }
    with launch(grid, waits=False) as (block, outputs, thread), together(1):
        operands = Operands(product.form, thread, THREADS)
        lane, tile = T.floormod(thread, WARP), outputs * WARPS + T.floordiv(thread, WARP)
        memory, sums = dynamic(size.words(product), product.form.value_bytes), local((size.sums,))
        totals = Totals(memory, thread, THREADS, size.sums)
        x = _Ahead(product, image, size, memory, block, thread)
        weights = _WeightsAhead(product, operands, tile)
        slab = Slab(operands, size.rows, 1, product.x_parts, sums)
        weights.load(0)
        x.prepare()
        after_launches()
        x.begin()
        with T.serial(0, product.strands(), unroll=False) as strand:
            with T.If(strand > 0), T.Then():
                totals.add(sums, strand > 1)
            fill(sums, f32(0))
            with T.serial(0, product.slabs_of(strand), unroll=False) as i:
                index = strand * product.run() + i
                own = weights.next(index)
                slab.weights = [own]
                if isinstance(own, Coded):
                    _multiply_codes(slab, own, x, index)
                    slab.add_offsets(lambda n, at: image.pair(block * size.rows + n, index, at, lane))
                else:
                    _multiply_numbers(slab, own, x, index)
        with T.unroll(0, size.rows) as n:
            for i in range(4):
                row = block * rows + n * ROWS + operands.quarter * 2 + i % 2
                output = tile * TILE + operands.first + i // 2 * 8
                with T.If(tirx.all(row < product.out.shape[0], output < product.width)), T.Then():
                    T.buffer_store(product.out, totals.before(n * 4 + i, i32(product.strands()) > 1) + sums[n * 4 + i], [row, output])


def _multiply_numbers(slab: Slab, weights: Plain, x: _Ahead, index: Any) -> None:
    """A slab of weights that are numbers, added to sums."""
    a = [local((STEPS * 4,), "uint32") for _ in range(2)]
    for block in range(BLOCKS):
        own, at = a[block % 2], index * BLOCKS + block
        for i, word in enumerate(word for step in weights.words(block) for word in step[0]):
            T.buffer_store(own, word, [i])
        x.next(at)
        begin_group_products(own, STEPS * 4)
        for step in range(STEPS):
            for part in reversed(range(slab.x_parts)):
                x.multiply(slab.sums, own[step * 4], step, part, 1)
        commit_group_products()
        if block:
            wait_group_products(1)
            x.release(at - 1)
    # Sums on their way into the next turn of a loop would have ptxas wait for each product by itself.
    wait_group_products(0, slab.sums, slab.rows * ROWS)
    x.release(index * BLOCKS + BLOCKS - 1)


def _multiply_codes(slab: Slab, weights: Coded, x: _Ahead, index: Any) -> None:
    """A slab of codes: sums of a run of products wait for its scale, those of two runs by turns."""
    run, rows = slab.operands.form.run, slab.rows * ROWS
    partial = [local((slab.rows * 4,)) for _ in range(2)]
    a = [local((run * 4,), "uint32") for _ in range(2)]
    waiting: list[int] = []  # the last step of a run whose products are on their way

    def settle(left: int) -> None:
        """Scale the first run that waits; so many others are on their way."""
        step = waiting.pop(0)
        own = step // run % 2
        wait_group_products(left, partial[own], rows)
        if step % STEPS == STEPS - 1:
            x.release(index * BLOCKS + step // STEPS)
        scales = weights.scale(step)
        with T.unroll(0, slab.rows * 4) as i:
            scale = T.Select(i % 4 < 2, scales[0], scales[1])
            T.buffer_store(slab.sums, fma(scale, partial[own][i], slab.sums[i]), [i])

    for block in range(BLOCKS):
        words = weights.words(block)
        x.next(index * BLOCKS + block)
        for first in range(0, STEPS, run):
            own = (block * STEPS + first) // run % 2
            for i, word in enumerate(word for step in words[first : first + run] for word in step[0]):
                T.buffer_store(a[own], word, [i])
            begin_group_products(a[own], run * 4)
            for step in range(first, first + run):
                for part in reversed(range(slab.x_parts)):
                    begun = step > first or part < slab.x_parts - 1
                    x.multiply(partial[own], a[own][(step - first) * 4], step, part, int(begun))
            commit_group_products()
            if waiting:
                settle(1)
            waiting.append(block * STEPS + first + run - 1)
    settle(0)


class _WeightsAhead:
    """Words of a warp's tile, which lanes have read a slab before they make operands of them."""

    def __init__(self, product: Product, operands: Operands, tile: Any) -> None:
        self.product, self.operands, self.tile = product, operands, product.tiles(tile, 1)[0]
        count = len(self._places(0))
        self.now, self.later = local((count,), "uint32"), local((count,), "uint32")

    def _places(self, slab: Any) -> list[tuple[int, Any]]:
        """Which words of a slab operands are made of, in order."""
        noted = _Noted(self._words(slab))
        with IRBuilder(), T.prim_func():  # what is made of them here is thrown away
            weights = self.operands.slab(noted)
            for block in range(BLOCKS):
                weights.words(block)
            if isinstance(weights, Coded):
                for at in range(self.operands.form.offsets):
                    weights.offsets(at)
            T.evaluate(0)
        return noted.places

    def _words(self, slab: Any) -> _Early:
        return _Early(self.product.pieces(), self.product.weight, self.tile, slab)

    def load(self, slab: Any) -> None:
        """Begin to read a slab."""
        words = self._words(slab)
        for i, (piece, at) in enumerate(self._places(slab)):
            T.buffer_store(self.later, words.early(piece, at), [i])

    def next(self, slab: Any) -> Plain | Coded:
        """What the slab's operands are made of; the one behind it begins to come."""
        for i in range(int(self.now.shape[0])):
            T.buffer_store(self.now, self.later[i], [i])
        self.load(T.min(slab + 1, self.product.slabs() - 1))
        return self.operands.slab(_Known(self._words(slab), self.now))


class _Early(Words):
    """Words that are read where it says so, not where they are used."""

    def early(self, piece: int, at: Any) -> Any:
        """Word `at` of a piece; of -1, of the head of a tile."""
        if piece < 0:
            return load(self.matrix[self.tile, at])
        place = self.pieces.starts(self.slab)[piece] + at
        found = load(self.pieces.at(self.matrix, self.tile, place))
        return found if self.pieces.whole else T.if_then_else(place < self.pieces.words, found, tirx.const(0, "uint32"))


class _Noted(Words):
    """Writes down which words are asked for; -1 stands for the head of a tile."""

    def __init__(self, words: Words) -> None:
        super().__init__(words.pieces, words.matrix, words.tile, words.slab)
        self.places: list[tuple[int, Any]] = []

    def word(self, piece: int, at: Any) -> Any:
        self.places.append((piece, at))
        return held(tirx.const(0, "uint32"), "uint32")

    def of_row(self, row: Any) -> Any:
        self.places.append((-1, row))
        return held(f32(0))


class _Known(Words):
    """Words that were read before, in the order in which they are asked for."""

    def __init__(self, words: Words, found: Any) -> None:
        super().__init__(words.pieces, words.matrix, words.tile, words.slab)
        self.found, self.count = found, 0

    def word(self, piece: int, at: Any) -> Any:
        self.count += 1
        return self.found[self.count - 1]

    def of_row(self, row: Any) -> Any:
        return T.reinterpret("float32", held(self.word(-1, row), "uint32"))


class _Ahead:
    """x of a block of the grid, 32 columns of x at a time, behind the totals in shared memory.

    Eight rows by eight columns stand together, as a matrix of 128 bytes, and all that there are of eight rows. One
    thread has them copied as a whole. Warps go on without each other: a stage has two counts of arrivals, of what comes
    and of warps whose products are done with what came.
    """

    def __init__(self, product: Product, image: Image, size: Size, memory: Any, block: Any, thread: Any) -> None:
        self.image, self.size, self.memory, self.block, self.thread = image, size, memory, block, thread
        self.first, self.parts = THREADS * size.sums, product.x_parts
        self.count = image.blocks
        self.there, self.done = shared((size.stages,), "uint64"), shared((size.stages,), "uint64")

    def prepare(self) -> None:
        """Counts begin."""
        with T.If(self.thread == 0), T.Then():
            for stage in range(self.size.stages):
                begin_arrivals(self.there[stage], 1)
                begin_arrivals(self.done[stage], WARPS)
        barrier()

    def begin(self) -> None:
        """Let the first blocks of columns come."""
        with T.If(self.thread == 0), T.Then():
            for index in range(min(self.size.stages - 2, self.count)):
                self._copy(i32(index))

    def next(self, index: Any) -> None:
        """Block `index` of 32 columns is there, for tensor cores; another one comes in place of the last but one."""
        later = held(index + (self.size.stages - 2), "int32")
        with T.If(tirx.all(self.thread == 0, later < self.count)), T.Then():
            wait_arrivals(self.done[self._stage(later)], T.floordiv(later, self.size.stages) + 1)
            self._copy(later)
        self.stage = held(self._stage(index), "int32")
        wait_arrivals(self.there[self.stage], T.floordiv(index, self.size.stages))

    def release(self, index: Any) -> None:
        """The warp's products of a block are done."""
        with T.If(T.floormod(self.thread, WARP) == 0), T.Then():
            arrive(self.done[self._stage(index)])

    def _stage(self, index: Any) -> Any:
        return T.floormod(index, self.size.stages)

    def _copy(self, index: Any) -> None:
        """A block of columns begins to come."""
        words = self.size.rows * self.image.block_words
        given = self.image.data[self.image.apart(self.block, index, self.size.rows)]
        copy_whole(self.memory[self.first + self._stage(index) * words], given, 4 * words, self.there[self._stage(index)])

    def multiply(self, sums: Any, a: Any, step: int, part: int, begun: int) -> None:
        """sums += weights by one of the two products of a block, by one part of x; `begun` 0: sums from zero."""
        first = self.first + self.stage * (self.size.rows * self.image.block_words)
        offset = (step * self.parts + part) * 2 * MATRIX
        group_mma(
            self.size.rows * ROWS, sums, a, self.memory[first], 4 * offset, 4 * self.image.block_words, begun
        )
