"""Linear layers on CUDA: packed weights as operands of tensor cores, out of any format.

A warp multiplies 16 outputs, one tile of packed weights, with 8 rows of x at a time. Which of the 16 columns of such a
product is which is ours to choose, so lanes keep what they read (operands.py, fragments.py). No weight goes through
shared memory.

Of block formats products are of whole numbers and x: a sum over the columns that share a scale is multiplied with that,
and stored offsets are weights of columns of their own, whose x is the sum of the block's x.

Sums are made in one order whatever the number of rows: a slab is 128 columns, neighbouring slabs make up a strand, which
is summed from zero, and strands are added in order. With few rows each strand has a warp of its own, with many rows each
warp goes over all strands. So a row has the same bits alone and beside others, wherever it stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.arguments import arguments
from llmc.targets.cuda.fragments import Read, floats, pairs
from llmc.targets.cuda.launch import barrier, dynamic, f32, fill, launch, local, shared
from llmc.targets.cuda.operands import STEPS, Operands
from llmc.targets.cuda.prelude import wait_copies
from llmc.targets.cuda.slab import ROWS, BlockSums, SharedSums, Slab
from llmc.targets.cuda.stream import BLOCK, BLOCKS, SLAB, Pieces, Stream, Words
from llmc.targets.cuda.target import STATIC_SHARED_BYTES, WARP, CudaTarget

MOST_STRANDS = 8
WIDE = 1024  # tiles of outputs from which on a warp takes more of them: there are blocks enough
STAGED_PARTS = 2  # of blocks of x that are in shared memory at once: two blocks in one part, one in two parts


@dataclass(frozen=True)
class Shape:
    """What a launch does: of a block, `rows` of x by eights, and tiles of outputs of a warp."""

    most: int | None  # rows of x that it is chosen for; None: any
    rows: int
    tiles: int  # the most there may be
    warps: int | None  # that share rows of x; None: every warp has a strand
    stages: int = 0  # slabs of weights of a warp in shared memory, on their way but for one; 0: weights are read directly

    def gathered_bytes(self, strands: int) -> int:
        """Shared memory in which strands meet."""
        return 4 * strands * self.rows * ROWS * (self.tiles * TILE + 4)

    def fitted(self, target: CudaTarget, strands: int, pieces: Pieces, width: int) -> Shape:
        """With stages and tiles so that two blocks fit a multiprocessor: most tiles first, which share what x becomes."""
        room = target.shared_bytes // 2
        for count in (4, 2, 1):
            for stages in (4, 2):
                found = replace(self, tiles=count, stages=stages)
                copied = 4 * strands * stages * Stream.words(pieces, count)
                fits = found.gathered_bytes(strands) <= STATIC_SHARED_BYTES
                if fits and count <= self.tiles and copied + found.gathered_bytes(strands) <= room:
                    if count <= 2 or tiles(width) >= WIDE:
                        return found
        return replace(self, tiles=1)


# Few rows share what is made of x; a batch shares weights too; a prefill reads x once a block.
SHAPES = (Shape(8, 1, 4, None), Shape(64, 4, 2, None), Shape(None, 8, 2, 4))


@dataclass(frozen=True)
class _Product:
    """One linear layer in a launch of shape `shape`."""

    x: Any
    weight: Any
    out: Any
    format: str
    width: int
    columns: int
    read: Read
    x_parts: int  # of a number of x
    shape: Shape

    def run(self) -> int:
        """Slabs of a strand."""
        return -(-self.slabs() // MOST_STRANDS)

    def slabs(self) -> int:
        """Of a row."""
        return -(-self.columns // SLAB)

    def strands(self) -> int:
        """Of a row: none is empty, the last one may be short."""
        return -(-self.slabs() // self.run())

    def slabs_of(self, strand: Any) -> Any:
        """How many slabs a strand has."""
        run = self.run()
        return run if self.slabs() % run == 0 else T.min(run, self.slabs() - strand * run)

    def tiles(self, first: Any) -> list[Any]:
        """A warp's tiles; those that there are, in place of some beyond the last."""
        return [T.min(first + own, tiles(self.width) - 1) for own in range(self.shape.tiles)]

    def pieces(self) -> Pieces:
        """Where a slab stands in a tile."""
        tile = math.prod(int(size) for size in self.weight.shape[1:])
        return Pieces(self.format, self.columns, tile)

    def direct(self, first: Any, slab: Any) -> list[Words]:
        """A slab of a warp's tiles, out of the matrix."""
        return [Words(self.pieces(), self.weight, tile, slab) for tile in self.tiles(first)]

    def words(self, row: Any, column: Any, operands: Operands) -> list[list[Any]]:
        """A lane's words of 32 columns, for each product. A row beyond the last is another one, and not written."""
        row, whole = T.min(row, self.out.shape[0] - 1), self.columns % SLAB == 0
        found = self.read(self.x, row, column, operands.quarter, operands.pair, whole)
        return [[word for part in step for word in part] for step in found]


def _few(product: _Product) -> None:
    """Every warp a strand of the same rows and outputs; x out of the caches."""
    shape, strands = product.shape, product.strands()
    grid = {
        "blockIdx.x": -(-tiles(product.width) // shape.tiles),
        "blockIdx.y": T.floordiv(product.out.shape[0] + (shape.rows * ROWS - 1), shape.rows * ROWS),
        "threadIdx.x": strands * WARP,
    }
    with launch(grid) as (outputs, block, thread):
        operands = Operands(product.format, thread, strands * WARP)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        pieces, tile = product.pieces(), outputs * shape.tiles
        stage = Stream.words(pieces, shape.tiles)
        if shape.stages:
            memory = dynamic(strands * shape.stages * stage)
            first = warp * (shape.stages * stage)
            stream = Stream(pieces, product.weight, product.tiles(tile), memory, first, shape.stages)
        sums = local((shape.rows * shape.tiles * 4,))
        fill(sums, f32(0))
        slab = Slab(operands, shape.rows, shape.tiles, product.x_parts, sums)
        x_sums = BlockSums(operands, shape.rows)
        rows = [(block * shape.rows + n) * ROWS + operands.first for n in range(shape.rows)]
        if shape.stages:
            stream.begin(warp * product.run(), product.slabs_of(warp), lane)
        with T.serial(0, product.slabs_of(warp), unroll=False) as i:
            index = warp * product.run() + i
            slab.begin(stream.next(i) if shape.stages else product.direct(tile, index))
            x_sums.begin()
            for of in range(BLOCKS):
                column = index * SLAB + of * BLOCK
                words = [product.words(row, column, operands) for row in rows]
                slab.block(of)
                for step in range(STEPS):
                    for n in range(shape.rows):
                        slab.take(n, words[n][step])
                        x_sums.add(n, of, step, words[n][step])
                    slab.multiply(of * STEPS + step)
            slab.add_offsets(x_sums.pair)
        if shape.stages:
            wait_copies(0)
        _gather(product, sums, outputs, block, thread)


def _gather(product: _Product, sums: Any, outputs: Any, block: Any, thread: Any) -> None:
    """What strands summed, added in their order and written."""
    shape, strands = product.shape, product.strands()
    rows, wide = shape.rows * ROWS, shape.tiles * TILE
    parts = shared((strands, rows, wide + 4))  # 4: then lanes that write together write to banks of their own
    strand, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
    for n in range(shape.rows):
        for tile in range(shape.tiles):
            for i in range(4):
                row = n * ROWS + T.floormod(lane, 4) * 2 + i % 2
                column = tile * TILE + T.floordiv(lane, 4) + i // 2 * 8
                T.buffer_store(parts, sums[(n * shape.tiles + tile) * 4 + i], [strand, row, column])
    barrier()
    total, threads = local((1,)), strands * WARP
    with T.serial(0, -(-rows * wide // threads), unroll=False) as step:
        place = step * threads + thread
        own, column = T.floordiv(place, wide), T.floormod(place, wide)
        row, output = block * rows + own, outputs * wide + column
        with T.If(tirx.all(place < rows * wide, row < product.out.shape[0], output < product.width)), T.Then():
            T.buffer_store(total, f32(0), [0])
            for other in range(strands):
                T.buffer_store(total, total[0] + parts[other, own, column], [0])
            T.buffer_store(product.out, total[0], [row, output])


def _many(product: _Product, warps: int) -> None:
    """Every warp other outputs, for rows of x that are staged in shared memory; one strand after another."""
    shape, threads = product.shape, warps * WARP
    rows = shape.rows * ROWS
    grid = {
        "blockIdx.x": T.floordiv(product.out.shape[0] + (rows - 1), rows),
        "blockIdx.y": -(-tiles(product.width) // (shape.tiles * warps)),
        "threadIdx.x": threads,
    }
    with launch(grid) as (block, outputs, thread):
        operands = Operands(product.format, thread, threads)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        count = shape.rows * shape.tiles * 4
        sums, totals = local((count,)), shared((count, threads))  # each thread's own: they would not fit in registers
        slab = Slab(operands, shape.rows, shape.tiles, product.x_parts, sums)
        x_sums = SharedSums(operands, shape.rows, warps, warp, lane)
        staged = _Staged(product, operands, block, thread, threads)
        tile = (outputs * warps + warp) * shape.tiles
        with T.serial(0, count) as i:
            T.buffer_store(totals, f32(0), [i, thread])
        with T.serial(0, product.strands(), unroll=False) as strand:
            fill(sums, f32(0))
            with T.serial(0, product.slabs_of(strand), unroll=False) as i:
                index = strand * product.run() + i
                slab.begin(product.direct(tile, index))
                x_sums.own.begin()
                for of in range(BLOCKS):
                    if of % staged.blocks == 0:
                        staged.fill(index, of)
                    slab.block(of)
                    for step in range(STEPS):
                        with T.unroll(0, shape.rows) as n:
                            slab.take(n, staged.read(n, of, step, lane))
                        x_sums.add(of, step, lambda n, of=of, step=step: staged.read(n, of, step, lane))  # type: ignore[misc]
                        slab.multiply(of * STEPS + step)
                x_sums.share()
                slab.add_offsets(x_sums.pair)
            for i in range(count):
                T.buffer_store(totals, totals[i, thread] + sums[i], [i, thread])
        with T.unroll(0, shape.rows) as n:
            for own in range(shape.tiles):
                for i in range(4):
                    row = block * rows + n * ROWS + operands.quarter * 2 + i % 2
                    output = (tile + own) * TILE + operands.first + i // 2 * 8
                    with T.If(tirx.all(row < product.out.shape[0], output < product.width)), T.Then():
                        T.buffer_store(product.out, totals[(n * shape.tiles + own) * 4 + i, thread], [row, output])


class _Staged:
    """Some blocks of a slab of x in shared memory, as lanes read them: of a product a slot a lane, words of all parts."""

    def __init__(self, product: _Product, operands: Operands, block: Any, thread: Any, threads: int) -> None:
        self.product, self.operands, self.block, self.thread, self.threads = product, operands, block, thread, threads
        self.words = 2 * product.x_parts
        self.blocks = STAGED_PARTS // product.x_parts
        self.rows = product.shape.rows
        self.slots = shared((self.rows * self.blocks * STEPS * WARP * self.words,), "uint32")

    def _slot(self, rows: Any, block: Any, step: int, lane: Any) -> Any:
        return T.ramp((((rows * self.blocks + block) * STEPS + step) * WARP + lane) * self.words, 1, self.words)

    def fill(self, slab: Any, block: int) -> None:
        """32 columns from block `block` on, and those of the next blocks, once all threads are done with those before."""
        barrier()
        with T.serial(0, self.rows * self.blocks * WARP // self.threads) as i:
            place = i * self.threads + self.thread
            lane, rest = place % WARP, T.floordiv(place, WARP)
            own, rows = rest % self.blocks, T.floordiv(rest, self.blocks)
            row = (self.block * self.rows + rows) * ROWS + self.operands.first
            found = self.product.words(row, slab * SLAB + (block + own) * BLOCK, self.operands)
            for step in range(STEPS):
                held = local((self.words,), "uint32")
                for at, word in enumerate(found[step]):
                    T.buffer_store(held, word, [at])
                T.buffer_store(self.slots, held[T.ramp(0, 1, self.words)], [self._slot(rows, own, step, lane)])
        barrier()

    def read(self, rows: Any, block: int, step: int, lane: Any) -> list[Any]:
        """The words that a lane multiplies with."""
        held = local((self.words,), "uint32")
        slot = self._slot(rows, block % self.blocks, step, lane)
        T.buffer_store(held, self.slots[slot], [T.ramp(0, 1, self.words)])
        return [held[i] for i in range(self.words)]


def _linear(
    target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], dtype: str, columns: int, read: Read, parts: int
) -> Any:
    """x, weight -> (M, N), of so many columns a row of x, which `read` reads in so many parts."""
    matrix = {"f32": "float32"}.get(str(attrs["format"]), "int32")
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments([dtype, matrix, "float32"], shapes)

        def choose(shape: Shape, *others: Shape) -> None:
            product = _Product(
                x, weight, out, str(attrs["format"]), int(attrs["width"]), columns, read, parts, shape,
            )  # fmt: skip
            if shape.most is None:
                _many(product, shape.warps or 1)
                return
            fitted = shape.fitted(target, product.strands(), product.pieces(), product.width)
            with T.If(out.shape[0] <= shape.most):
                with T.Then():
                    _few(replace(product, shape=fitted))
                with T.Else():
                    choose(*others)

        choose(*SHAPES)
    return builder.get()


def packed_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K), packed (N = width, K) -> (M, N): x in two parts of bfloat16."""
    columns = int(shapes[0][1])
    return _linear(target, shapes, attrs, "float32", columns, floats(columns), 2)


def bf16_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """bfloat16 pairs x (M, K/2), packed (N = width, K) -> (M, N)."""
    count = int(shapes[0][1])
    return _linear(target, shapes, attrs, "int32", 2 * count, pairs(count), 1)
