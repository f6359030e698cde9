"""Products of few rows on CUDA: each warp of a block has a strand of the same rows and outputs.

Weights come ahead into shared memory (stream.py). Of one to eight rows warps make operands of x themselves, of more
they read its image.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.cuda.image import Image
from llmc.targets.cuda.launch import after_launches, barrier, dynamic, f32, fill, launch, local, shared, together
from llmc.targets.cuda.operands import STEPS, Operands
from llmc.targets.cuda.prelude import wait_copies
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.slab import BlockSums, Slab
from llmc.targets.cuda.stream import BLOCK, BLOCKS, SLAB, Stream
from llmc.targets.cuda.target import STATIC_SHARED_BYTES, WARP, CudaTarget


@dataclass(frozen=True)
class Shape:
    """Of a block: rows of x by eights, and the most tiles of outputs."""

    rows: int
    tiles: int
    stages: int = 0  # slabs of weights of a warp in shared memory, all but one on their way; 0: weights are read as is

    def gathered_bytes(self, strands: int) -> int:
        """Shared memory in which strands meet."""
        return 4 * strands * self.rows * ROWS * (self.tiles * TILE + 4)

    def fitted(self, target: CudaTarget, product: Product) -> Shape:
        """With most tiles, which share operands of x, and stages with which two blocks fit a multiprocessor, or one."""
        strands, pieces = product.strands(), product.pieces()
        for count, (blocks, stages) in itertools.product((2, 1), ((2, 4), (2, 2), (1, 2))):
            found = replace(self, tiles=count, stages=stages)
            gathered = found.gathered_bytes(strands)
            copied = 4 * strands * found.stages * Stream.words(pieces, found.tiles)
            room = gathered + product.form.value_bytes <= STATIC_SHARED_BYTES
            if found.tiles <= self.tiles and room and gathered + copied <= target.shared_bytes // blocks:
                return found
        return replace(self, tiles=1)


def multiply_few(product: Product, shape: Shape, image: Image | None) -> None:
    """The launch; x as it is, or its image."""
    strands = product.strands()
    grid = {
        "blockIdx.x": -(-tiles(product.width) // shape.tiles),
        "blockIdx.y": T.floordiv(product.out.shape[0] + (shape.rows * ROWS - 1), shape.rows * ROWS),
        "threadIdx.x": strands * WARP,
    }
    # More rows want more registers than two blocks have.
    with launch(grid, waits=False) as (outputs, block, thread), together(2) if image is None else nullcontext():
        operands = Operands(product.form, thread, strands * WARP)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        pieces, tile = product.pieces(), outputs * shape.tiles
        stage = Stream.words(pieces, shape.tiles)
        if shape.stages:
            memory = dynamic(strands * shape.stages * stage, shape.gathered_bytes(strands) + product.form.value_bytes)
            first = warp * (shape.stages * stage)
            stream = Stream(pieces, product.weight, product.tiles(tile, shape.tiles), memory, first, shape.stages)
        sums = local((shape.rows * shape.tiles * 4,))
        fill(sums, f32(0))
        slab = Slab(operands, shape.rows, shape.tiles, product.x_parts, sums)
        if image is None:
            x_sums = BlockSums(operands, shape.rows)
            rows = [(block * shape.rows + n) * ROWS + operands.first for n in range(shape.rows)]
        if shape.stages:
            stream.begin(warp * product.run(), product.slabs_of(warp), lane)
        after_launches()
        with T.serial(0, product.slabs_of(warp), unroll=False) as i:
            index = warp * product.run() + i
            x = None if image is None else _Images(image, shape.rows, block * shape.rows, index, lane)
            slab.begin(stream.next(i) if shape.stages else product.direct(tile, index, shape.tiles))
            if x is None:
                _multiply_rows(product, slab, rows, index, x_sums)
            else:
                x.multiply(slab)
        if shape.stages:
            wait_copies(0)
        _gather(product, shape, sums, outputs, block, thread)


def _multiply_rows(product: Product, slab: Slab, rows: list[Any], index: Any, sums: BlockSums) -> None:
    """A slab of some rows of x."""
    sums.begin()
    for of in range(BLOCKS):
        words = [product.words(row, index * SLAB + of * BLOCK, slab.operands) for row in rows]
        for n, found in enumerate(words):
            sums.add(n, of, found)
        slab.multiply(of, lambda n, step, words=words: words[n][step])  # type: ignore[misc]
    slab.add_offsets(sums.pair)


class _Images:
    """A slab of the image of x. Lanes read several blocks of columns at once, the first ones while weights come."""

    def __init__(self, image: Image, rows: int, first: Any, index: Any, lane: Any) -> None:
        self.image, self.rows, self.first, self.index, self.lane = image, rows, first, index, lane
        self.blocks = BLOCKS // image.product.x_parts
        self.words = local((self.blocks * rows * STEPS * image.words,), "uint32")
        self._read(0)

    def _read(self, start: int) -> None:
        for of in range(self.blocks):
            for n in range(self.rows):
                for step in range(STEPS):
                    found = self.image.read(self.first + n, self.index, start + of, step, self.lane)
                    for at, word in enumerate(found):
                        T.buffer_store(self.words, word, [self._place(of, n, step) + at])

    def _place(self, of: int, n: Any, step: int) -> Any:
        return ((of * self.rows + n) * STEPS + step) * self.image.words

    def multiply(self, slab: Slab) -> None:
        """All of it."""
        for start in range(0, BLOCKS, self.blocks):
            if start:
                self._read(start)
            for of in range(self.blocks):
                slab.multiply(start + of, lambda n, step, of=of: self._taken(of, n, step))  # type: ignore[misc]
        slab.add_offsets(lambda n, at: self.image.pair(self.first + n, self.index, at, self.lane))

    def _taken(self, of: int, n: Any, step: int) -> list[Any]:
        place = self._place(of, n, step)
        return [self.words[place + at] for at in range(self.image.words)]


def _gather(product: Product, shape: Shape, sums: Any, outputs: Any, block: Any, thread: Any) -> None:
    """What strands summed, added in their order and written."""
    strands = product.strands()
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
