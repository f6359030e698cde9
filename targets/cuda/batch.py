"""Products of 9 to 64 rows by codes on CUDA, where a chip has `wgmma`: x stays in blocks, weights pass.

There is one block for each multiprocessor. It makes operands of x out of one strand's columns once, in shared memory,
and multiplies one group of outputs after another with them: sixteen tiles, one a warp, four warps a product. A warp's
ring of weights goes on over its tiles, and is full before what is in front of the launch has ended. So x is read once
by a block, and not once for each output or two.

What strands summed goes to memory of the step, and a launch of its own adds it in their order. (To have the last warp
that comes add it was slower on an H100.)
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.cuda.activated import Activated
from llmc.targets.cuda.batch_rows import Rows, Size, multiply_codes
from llmc.targets.cuda.launch import (
    after_launches,
    barrier,
    dynamic,
    f32,
    fill,
    held,
    launch,
    local,
    shuffled,
    together,
)
from llmc.targets.cuda.operands import Coded, Operands
from llmc.targets.cuda.prelude import wait_copies
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.ring import Ring
from llmc.targets.cuda.slab import Slab
from llmc.targets.cuda.target import WARP, CudaTarget

_AHEAD = 60 << 10  # bytes of weights that should be on their way to a multiprocessor
_MOST_STAGES = 10
_ADDING = 256  # threads of a block that adds strands
_RESERVED = 1 << 10  # bytes of shared memory that a block takes beside its own


def fitted(target: CudaTarget, product: Product, rows: int) -> Size | None:
    """A size for so many eights of rows: a strand of x as a whole, or a part that leaves weights room.

    None where tensor cores take no such operands, and of weights that are numbers: more bytes than x in one part.
    """
    if not target.wgmma or not product.form.run:
        return None
    room = target.shared_bytes - product.form.value_bytes - _RESERVED
    stage = 4 * Size(rows, 0, 1).words(product)
    for chunks in range(1, product.run() + 1):
        slabs = -(-product.run() // chunks)
        stages = min((room - 4 * Size(rows, slabs, 0).words(product)) // stage, _MOST_STAGES)
        if stages >= 2 and (stages - 1) * stage >= _AHEAD:
            return Size(rows, slabs, stages)
    return None


class Strands:
    """Memory of the step in which strands meet: a lane's four numbers of eight rows by a tile stand together."""

    def __init__(self, product: Product, rows: int, most: int) -> None:
        """For blocks of at most so many eights of rows, and `most` rows in all. Made outside of launches."""
        self.product = product
        eights = T.floordiv(product.out.shape[0] + (rows * ROWS - 1), rows * ROWS) * rows
        shape = (product.strands(), T.min(eights, most // ROWS), tiles(product.width), 4 * WARP)
        self.data = T.alloc_buffer(shape)

    def put(self, strand: Any, eight: Any, tile: Any, lane: Any, four: Any) -> None:
        """What a strand summed."""
        T.buffer_store(self.data, four, [strand, eight, tile, T.ramp(lane * 4, 1, 4)])

    def add_all(self, rows: int, then: Activated | None) -> None:
        """The launch that adds them, of blocks of so many eights of rows."""
        count = (tiles(self.product.width) if then is None else then.tiles_of_half(self.product.width)) * rows * WARP
        blocks = T.floordiv(self.product.out.shape[0] + (rows * ROWS - 1), rows * ROWS)
        grid = {"blockIdx.x": -(-count // _ADDING), "blockIdx.y": blocks, "threadIdx.x": _ADDING}
        with launch(grid) as (block, of_rows, thread):
            place = block * _ADDING + thread
            n, tile = T.floordiv(place, WARP) % rows, T.floordiv(place, WARP * rows)
            with T.If(place < count), T.Then():
                if then is None:
                    self._add(of_rows * rows + n, tile, place % WARP)
                else:
                    self._activate(of_rows * rows + n, tile, place % WARP, then)

    def _totals(self, eight: Any, tile: Any, lane: Any) -> Any:
        """Of a lane's four numbers all strands, in order."""
        count = self.product.strands()
        total, found = local((4,)), local((4 * count,))
        for strand in range(count):
            four = self.data[strand, eight, tile, T.ramp(lane * 4, 1, 4)]
            T.buffer_store(found, four, [T.ramp(4 * strand, 1, 4)])
        fill(total, f32(0))
        for strand in range(count):
            for i in range(4):
                T.buffer_store(total, total[i] + found[4 * strand + i], [i])
        return total

    def _add(self, eight: Any, tile: Any, lane: Any) -> None:
        """A lane's four numbers, written where they are wanted."""
        out, row = self.product.out, eight * ROWS + lane % 4 * 2
        with T.If(row < out.shape[0]), T.Then():
            total = self._totals(eight, tile, lane)
            for i in range(4):
                output = tile * TILE + T.floordiv(lane, 4) + i // 2 * 8
                with T.If(tirx.all(row + i % 2 < out.shape[0], output < self.product.width)), T.Then():
                    T.buffer_store(out, total[i], [row + i % 2, output])

    def _activate(self, eight: Any, tile: Any, lane: Any, then: Activated) -> None:
        """What an activation makes of them. Lanes whose outputs are neighbours exchange: each has one of two rows."""
        width = self.product.width
        halves = [self._totals(eight, tile + half * then.tiles_of_half(width), lane) for half in range(then.halves)]
        second = T.floordiv(lane, 4) % 2  # the row and the output of two that are the lane's own
        row = eight * ROWS + lane % 4 * 2 + second
        for down in range(2):
            sums = []
            for total in halves:
                own = [total[2 * down], total[2 * down + 1]]
                kept = held(T.Select(second == 0, own[0], own[1]))
                other = shuffled(held(T.Select(second == 0, own[1], own[0])), 4, "float32")
                sums.append([held(T.Select(second == i, kept, other)) for i in range(2)])
            pair = T.floordiv(tile * TILE + T.floordiv(lane, 4) + 8 * down, 2)
            with T.If(tirx.all(row < self.product.out.shape[0], 2 * pair < width // then.halves)), T.Then():
                then.put(row, pair, sums)


def multiply_batch(
    target: CudaTarget, product: Product, size: Size, found: Strands, then: Activated | None
) -> None:  # fmt: skip
    """Both launches; strands meet in `found`, and what is made of their sums follows."""
    strands, count, warps = product.strands(), tiles(product.width), size.warps
    groups = -(-count // warps)
    step = min(groups, max(target.multiprocessors // strands, 1))  # blocks of a strand
    rows = T.floordiv(product.out.shape[0] + (size.rows * ROWS - 1), size.rows * ROWS)
    grid = {"blockIdx.x": strands * step, "blockIdx.y": rows, "threadIdx.x": warps * WARP}
    with launch(grid, waits=False) as (block, of_rows, thread), together(1):
        operands = Operands(product.form, thread, warps * WARP)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        strand, group = T.floormod(block, strands), T.floordiv(block, strands)
        first, slabs = strand * product.run(), held(product.slabs_of(strand), "int32")
        turns = T.floordiv(groups - 1 - group, step) + 1
        memory = dynamic(size.words(product), product.form.value_bytes)
        place = warp * (size.ring(product) // warps)
        ring = Ring(product.pieces(), product.weight, memory, place, size.room, lane)
        x = Rows(product, operands, size, memory, of_rows, thread)
        sums = local((size.rows * 4,))
        slab = Slab(operands, size.rows, 1, product.x_parts, sums)
        ring.begin(lambda turn: T.min((group + turn * step) * warps + warp, count - 1), turns, first, slabs)
        after_launches()
        if size.chunks(product) == 1:
            x.make(first, slabs)
        with T.serial(0, turns, unroll=False) as turn:
            fill(sums, f32(0))
            ring.begin_tile(turn)
            _multiply_strand(product, size, slab, ring, x, (first, slabs))
            tile = (group + turn * step) * warps + warp
            with T.If(tile < count), T.Then():
                for n in range(size.rows):
                    found.put(strand, of_rows * size.rows + n, tile, lane, sums[T.ramp(4 * n, 1, 4)])
        wait_copies(0)
    found.add_all(size.rows, then)


def _multiply_strand(
    product: Product, size: Size, slab: Slab, ring: Ring, x: Rows, strand: tuple[Any, Any]
) -> None:  # fmt: skip
    """A strand, its first slab and how many, by a tile's weights; x is there as a whole or comes in chunks."""
    first, slabs = strand
    with T.serial(0, size.chunks(product), unroll=False) as chunk:
        begun = chunk * size.slabs
        if size.chunks(product) > 1:
            barrier()
            x.make(first + begun, T.min(slabs - begun, size.slabs))
        with T.serial(0, T.min(slabs - begun, size.slabs), unroll=False) as i:
            x.begin(i)
            ring.arrive()
            weights = slab.operands.slab(ring.slab_of(begun + i, 0))
            slab.weights = [weights]
            assert isinstance(weights, Coded)
            multiply_codes(slab, weights, x)
            slab.add_offsets(x.sum)
            ring.leave()
