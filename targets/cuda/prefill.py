"""Products of many rows on CUDA: x comes ahead into shared memory, for all warps of a block; each has other outputs.

A warp goes over one strand after another. What it has summed of those before is in shared memory too: registers hold
one strand's sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.cuda.image import Image, block_words
from llmc.targets.cuda.launch import barrier, dynamic, f32, fill, held, launch, local, u32
from llmc.targets.cuda.operands import Operands
from llmc.targets.cuda.prelude import COPIED, commit_copies, copy_async, wait_copies
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.slab import Slab
from llmc.targets.cuda.stream import BLOCKS
from llmc.targets.cuda.target import WARP, CudaTarget

WARPS, TILES = 4, 2  # of a block, and of a warp
THREADS = WARPS * WARP
_RESERVED = 1 << 10  # bytes of shared memory that a block takes beside its own


@dataclass(frozen=True)
class Size:
    """Of a block: rows of x by eights, and blocks of 32 columns of x that are there or on their way."""

    rows: int
    stages: int

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.rows * TILES * 4

    def words(self, product: Product) -> int:
        """Of shared memory."""
        return THREADS * self.sums + self.stages * self.rows * block_words(product)


def fitted(target: CudaTarget, product: Product) -> Size:
    """The size of which two blocks fit a multiprocessor: most rows first, of which registers hold the sums."""
    form = product.form
    also_held = (form.run > 0 or form.parts > 1) + (form.run > 0 and product.x_parts > 1)  # parts, and unscaled sums
    most = 16 - 4 * also_held
    for rows in (most, 8):
        for stages in (4, 2):
            size = Size(rows, stages)
            if 2 * (4 * size.words(product) + form.value_bytes + _RESERVED) <= target.shared_bytes + _RESERVED:
                return size
    return Size(8, 2)


def multiply_many(product: Product, image: Image, size: Size) -> None:
    """The launch."""
    rows = size.rows * ROWS
    grid = {
        "blockIdx.x": T.floordiv(product.out.shape[0] + (rows - 1), rows),
        "blockIdx.y": -(-tiles(product.width) // (TILES * WARPS)),
        "threadIdx.x": THREADS,
    }
    with launch(grid) as (block, outputs, thread):
        operands = Operands(product.form, thread, THREADS)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        memory, sums = dynamic(size.words(product), product.form.value_bytes), local((size.sums,))
        slab = Slab(operands, size.rows, TILES, product.x_parts, sums)
        totals = Totals(memory, thread, THREADS, size.sums)
        ahead = _Ahead(product, image, size, memory, block, thread)
        tile = (outputs * WARPS + warp) * TILES
        ahead.begin()
        with T.serial(0, product.strands(), unroll=False) as strand:
            with T.If(strand > 0), T.Then():
                totals.add(sums, strand > 1)
            fill(sums, f32(0))
            with T.serial(0, product.slabs_of(strand), unroll=False) as i:
                index = strand * product.run() + i
                slab.begin(product.direct(tile, index, TILES))
                for of in range(BLOCKS):
                    ahead.next(index, of)
                    slab.multiply(of, lambda n, step, of=of: ahead.read(n, of, step, lane))  # type: ignore[misc]
                slab.add_offsets(lambda n, at: image.pair(block * size.rows + n, index, at, lane))
        wait_copies(0)
        several = tirx.const(product.strands() > 1, "bool")
        for i in range(size.sums):
            n, own = i // 4 // TILES, i // 4 % TILES
            row = block * rows + n * ROWS + operands.quarter * 2 + i % 2
            output = (tile + own) * TILE + operands.first + i // 2 % 2 * 8
            with T.If(tirx.all(row < product.out.shape[0], output < product.width)), T.Then():
                T.buffer_store(product.out, totals.before(i, several) + sums[i], [row, output])


class Totals:
    """A thread's sums of strands: the first `kept` in registers, the others at the beginning of shared memory."""

    def __init__(self, memory: Any, thread: Any, threads: int, count: int, kept: int = 0) -> None:
        self.memory, self.thread, self.threads, self.count, self.kept = memory, thread, threads, count, kept
        self.own = local((kept,)) if kept else None

    def add(self, sums: Any, begun: Any) -> None:
        """A strand more, or, where none is `begun`, the first one."""
        for i in range(self.count):
            total = self.before(i, begun) + sums[i]
            if self.own is not None and i < self.kept:
                T.buffer_store(self.own, total, [i])
            else:
                T.buffer_store(self.memory, T.reinterpret("uint32", held(total)), [self._place(i)])

    def before(self, i: int, begun: Any) -> Any:
        """One of them; zero, where none is `begun`."""
        if self.own is not None and i < self.kept:
            return T.if_then_else(begun, self.own[i], f32(0))
        word = T.if_then_else(begun, self.memory[self._place(i)], u32(0))
        return T.reinterpret("float32", held(word, "uint32"))

    def _place(self, i: int) -> Any:
        return (i - self.kept) * self.threads + self.thread


class _Ahead:
    """x of a block of the grid, 32 columns at a time, behind the totals in shared memory."""

    def __init__(self, product: Product, image: Image, size: Size, memory: Any, block: Any, thread: Any) -> None:
        self.image, self.size, self.memory, self.block, self.thread = image, size, memory, block, thread
        self.first, self.count = THREADS * size.sums, product.slabs() * BLOCKS

    def begin(self) -> None:
        """Let the first blocks of columns come."""
        for of in range(self.size.stages - 1):
            self._copy(of, of)

    def next(self, slab: Any, block: int) -> None:
        """Block `block` of a slab is there, for all threads; a later one comes in place of the one before."""
        wait_copies(self.size.stages - 2)
        barrier()
        self._copy(slab * BLOCKS + block + self.size.stages - 1, block + self.size.stages - 1)

    def _copy(self, index: Any, stage: int) -> None:
        """Block `index` of all columns, where there is one."""
        pieces = self.image.block_words // COPIED  # of eight rows
        with T.If(index < self.count), T.Then(), T.unroll(0, self.size.rows * pieces // THREADS) as turn:
            place = turn * THREADS + self.thread
            n = self.block * self.size.rows + T.floordiv(place, pieces)
            given = self.image.data[(n * self.count + index) * self.image.block_words + place % pieces * COPIED]
            copy_async(self.memory[self._stage(stage) + place * COPIED], given, 4 * COPIED)
        commit_copies()

    def _stage(self, stage: int) -> int:
        """The first word of a stage."""
        return self.first + stage % self.size.stages * self.size.rows * self.image.block_words

    def read(self, n: Any, block: int, step: int, lane: Any) -> list[Any]:
        """A lane's words of eight rows for a product."""
        words = self.image.words
        one = local((words,), "uint32")
        place = self._stage(block) + n * self.image.block_words + (step * WARP + lane) * words
        T.buffer_store(one, self.memory[T.ramp(place, 1, words)], [T.ramp(0, 1, words)])
        return [one[i] for i in range(words)]
