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
    together,
)
from llmc.targets.cuda.operands import STEPS, Coded, Operands, Plain
from llmc.targets.cuda.prefill import Totals
from llmc.targets.cuda.prelude import (
    COPIED,
    begin_group_products,
    commit_copies,
    commit_group_products,
    copy_async,
    group_mma,
    share_with_tensor_cores,
    wait_copies,
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
    """Of a block: rows of x by eights, blocks of 32 columns of x that come together, and how often they have room."""

    rows: int
    blocks: int
    stages: int

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.rows * 4

    def words(self, product: Product) -> int:
        """Of shared memory."""
        return THREADS * self.sums + self.stages * self.rows * self.blocks * block_words(product)


def fitted(target: CudaTarget, product: Product) -> Size | None:
    """The size that fits a multiprocessor; None where tensor cores take no such operands, or weights have two parts."""
    if not target.wgmma or product.form.parts > 1:
        return None
    rows = 16 if product.form.run else 32  # unscaled sums take twice as many registers as sums do
    sizes = (Size(rows, blocks, stages) for blocks in (4, 2, 1) for stages in (4, 3))
    room = target.shared_bytes - product.form.value_bytes
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
        totals.begin()
        weights.load(0)
        after_launches()
        x.begin()
        with T.serial(0, product.strands(), unroll=False) as strand:
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
            totals.add(sums)
        wait_copies(0)
        with T.unroll(0, size.rows) as n:
            for i in range(4):
                row = block * rows + n * ROWS + operands.quarter * 2 + i % 2
                output = tile * TILE + operands.first + i // 2 * 8
                with T.If(tirx.all(row < product.out.shape[0], output < product.width)), T.Then():
                    T.buffer_store(product.out, totals.read(n * 4 + i), [row, output])


def _multiply_numbers(slab: Slab, weights: Plain, x: _Ahead, index: Any) -> None:
    """A slab of weights that are numbers, added to sums."""
    together = x.size.blocks
    a = [local((together * STEPS * 4,), "uint32") for _ in range(2)]
    for first in range(0, BLOCKS, together):
        own = a[first // together % 2]
        if first >= 2 * together:
            wait_group_products(1)
        x.next(index, first)
        blocks = [word for of in range(together) for step in weights.words(first + of) for word in step[0]]
        for i, word in enumerate(blocks):
            T.buffer_store(own, word, [i])
        begin_group_products(own, len(blocks))
        for of in range(together):
            for step in range(STEPS):
                for part in reversed(range(slab.x_parts)):
                    x.multiply(slab.sums, own[(of * STEPS + step) * 4], of, step, part, i32(1))
        commit_group_products()
    # Sums on their way into the next turn of a loop would have ptxas wait for each product by itself.
    wait_group_products(0, slab.sums, slab.rows * ROWS)


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
        scales = weights.scale(step)
        with T.unroll(0, slab.rows * 4) as i:
            scale = T.Select(i % 4 < 2, scales[0], scales[1])
            T.buffer_store(slab.sums, fma(scale, partial[own][i], slab.sums[i]), [i])

    for block in range(BLOCKS):
        x.next(index, block)
        words = weights.words(block)
        for first in range(0, STEPS, run):
            own = (block * STEPS + first) // run % 2
            for i, word in enumerate(word for step in words[first : first + run] for word in step[0]):
                T.buffer_store(a[own], word, [i])
            begin_group_products(a[own], run * 4)
            for step in range(first, first + run):
                for part in reversed(range(slab.x_parts)):
                    begun = step > first or part < slab.x_parts - 1
                    x.multiply(partial[own], a[own][(step - first) * 4], block, step, part, i32(begun))
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

    def _words(self, slab: Any) -> Words:
        return Words(self.product.pieces(), self.product.weight, self.tile, slab)

    def load(self, slab: Any) -> None:
        """Begin to read a slab."""
        words = self._words(slab)
        for i, (piece, at) in enumerate(self._places(slab)):
            found = words.word(piece, at) if piece >= 0 else T.reinterpret("uint32", held(words.of_row(at)))
            T.buffer_store(self.later, found, [i])

    def next(self, slab: Any) -> Plain | Coded:
        """What the slab's operands are made of; the one behind it begins to come."""
        for i in range(int(self.now.shape[0])):
            T.buffer_store(self.now, self.later[i], [i])
        self.load(T.min(slab + 1, self.product.slabs() - 1))
        return self.operands.slab(_Known(self._words(slab), self.now))


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
    """x of a block of the grid, some blocks of columns at a time, behind the totals in shared memory.

    Eight rows by eight columns stand together, as a matrix of 128 bytes, and all that there are of eight rows.
    """

    def __init__(self, product: Product, image: Image, size: Size, memory: Any, block: Any, thread: Any) -> None:
        self.image, self.size, self.memory, self.block, self.thread = image, size, memory, block, thread
        self.first, self.parts = THREADS * size.sums, product.x_parts
        self.eight = size.blocks * image.block_words  # words of eight rows
        self.count = product.slabs() * BLOCKS // size.blocks

    def begin(self) -> None:
        """Let the first blocks of columns come."""
        for stage in range(self.size.stages - 2):
            self._copy(i32(stage))

    def next(self, slab: Any, block: int) -> None:
        """Block `block` of a slab is there, for threads and tensor cores; others come in place of the last but one's.

        Tensor cores may still read what came last, and nothing else: threads have waited for the products before.
        """
        if block % self.size.blocks:
            return
        index = slab * (BLOCKS // self.size.blocks) + block // self.size.blocks
        wait_copies(self.size.stages - 3)
        share_with_tensor_cores()
        barrier()
        self._copy(index + self.size.stages - 2)
        self.stage = self._stage(index)

    def _stage(self, index: Any) -> Any:
        words = self.size.rows * self.eight
        return held(self.first + T.floormod(index, self.size.stages) * words, "int32")

    def _copy(self, index: Any) -> None:
        """Blocks that come together, where there are any."""
        pieces, stage = self.eight // COPIED, self._stage(index)  # pieces of eight rows
        with T.If(index < self.count), T.Then(), T.unroll(0, self.size.rows * pieces // THREADS) as turn:
            place = turn * THREADS + self.thread
            n = self.block * self.size.rows + T.floordiv(place, pieces)
            given = self.image.data[n, index * self.eight + place % pieces * COPIED]
            copy_async(self.memory[stage + place * COPIED], given, 4 * COPIED)
        commit_copies()

    def multiply(self, sums: Any, a: Any, block: int, step: int, part: int, begun: Any) -> None:
        """sums += weights by one of the two products of a block, by one part of x; `begun` 0: sums from zero."""
        place = ((block % self.size.blocks * STEPS + step) * self.parts + part) * 2 * MATRIX
        group_mma(self.size.rows * ROWS, sums, a, self.memory[self.stage], 4 * place, 4 * self.eight, begun)
