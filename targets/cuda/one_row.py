"""Products of one row on CUDA, as decoding has them: blocks that stay, and weights that come all the time.

There are as many blocks as a chip holds at once; each takes one tile of outputs after another, a warp a strand. A
warp's ring of weights goes on over its tiles, and is full before what is in front of the launch has ended: so memory is
busy while others wait. x is made into operands once, by each warp what it multiplies.

Where an activation of a gate and what it gates follows, a block takes tiles of both by turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.cuda.activated import Activated
from llmc.targets.cuda.launch import (
    after_launches,
    barrier,
    dynamic,
    f32,
    fill,
    held,
    launch,
    local,
    shared,
    together,
    u32,
)
from llmc.targets.cuda.operands import STEPS, Operands
from llmc.targets.cuda.prelude import sync_warp, wait_copies
from llmc.targets.cuda.product import Product
from llmc.targets.cuda.ring import Ring, Room
from llmc.targets.cuda.slab import BlockSums, Slab, two_parts
from llmc.targets.cuda.stream import BLOCK, BLOCKS, SLAB
from llmc.targets.cuda.target import WARP, CudaTarget

QUARTERS = 4  # lanes that have other words of one row
_RESERVED = 1 << 10  # bytes of shared memory that a block takes beside its own
_MOST_STAGES = 12
_MOST_READS = 6  # of eight numbers of x, that a lane has on their way
_COPIES = 2 * WARP  # of what codes stand for: each lane has a bank of its own, and a code stands in a byte of a place


@dataclass(frozen=True)
class Size:
    """Blocks that a multiprocessor holds, and the room of a warp's ring."""

    blocks: int
    room: Room

    def words(self, product: Product) -> int:
        """Of shared memory, of rings and of x."""
        return product.strands() * (self.room.words(product.pieces()) + _x_words(product))


def fitted(target: CudaTarget, product: Product, then: Activated | None = None) -> Size | None:
    """Of most slabs together, two blocks a multiprocessor if that leaves enough; None where there is no room."""
    static = product.form.values_at(_COPIES) + _parts_bytes(product, then) + _RESERVED
    for blocks in (2, 1):
        for count, fewest in ((4, 2), (2, 2), (1, 3)):
            sizes = [Size(blocks, Room(count, stages)) for stages in range(fewest, _MOST_STAGES + 1)]
            fits = [
                size for size in sizes
                if blocks * (4 * size.words(product) + static) <= target.shared_bytes + _RESERVED
            ]  # fmt: skip
            if fits and count <= product.run():
                return fits[-1]
    return None


def _x_words(product: Product) -> int:
    """Of a strand: operands, and sums over blocks."""
    return product.run() * BLOCKS * (STEPS * QUARTERS * 2 * product.x_parts + product.form.offsets)


def _parts_bytes(product: Product, then: Activated | None) -> int:
    return 4 * 2 * _halves(then) * product.strands() * TILE


def _halves(then: Activated | None) -> int:
    return 1 if then is None else then.halves


def multiply_one(target: CudaTarget, product: Product, size: Size, then: Activated | None = None) -> None:
    """The launch."""
    halves, strands = _halves(then), product.strands()
    count = tiles(product.width) if then is None else then.tiles_of_half(product.width)
    blocks = min(count, size.blocks * target.multiprocessors)
    grid = {"blockIdx.x": blocks, "threadIdx.x": strands * WARP}
    with launch(grid, waits=False) as (block, thread), together(size.blocks):
        operands = Operands(product.form, thread, strands * WARP, _COPIES)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        parts = shared((2 * halves, strands, TILE))
        memory = dynamic(size.words(product), product.form.values_at(_COPIES) + _parts_bytes(product, then))
        slabs, words = held(product.slabs_of(warp), "int32"), size.room.words(product.pieces())
        ring = Ring(product.pieces(), product.weight, memory, warp * words, size.room, lane)
        x = _Row(product, operands, memory, strands * words + warp * _x_words(product))
        turns = (T.floordiv(count - 1 - block, blocks) + 1) * halves

        def tile(turn: Any) -> Any:
            own = T.min(block + T.floordiv(turn, halves) * blocks, count - 1)
            return own + turn % halves * count

        ring.begin(tile, turns, warp * product.run(), slabs)
        after_launches()
        x.make(warp * product.run(), slabs, lane)
        sums = local((4,))
        slab = Slab(operands, 1, 1, product.x_parts, sums)
        with T.serial(0, turns, unroll=False) as turn:
            fill(sums, f32(0))
            ring.begin_tile(turn)
            _multiply_tile(product, slab, ring, x, slabs)
            _put_strand(product, sums, parts, turn, thread)
            if then is None:
                _add_strands(product, parts, block + turn * blocks, turn, thread)
            else:
                with T.If(turn % halves == halves - 1), T.Then():
                    _activate_strands(product, parts, block + T.floordiv(turn, halves) * blocks, turn, thread, then)
        wait_copies(0)


def _multiply_tile(product: Product, slab: Slab, ring: Ring, x: _Row, slabs: Any) -> None:
    """All slabs of a strand, those of a unit without looking up."""
    together = ring.room.together

    def multiply(unit: Any, own: Any) -> None:
        i = unit * together + own
        slab.begin([ring.slab_of(unit, own)])
        for of in range(BLOCKS):
            slab.multiply(of, lambda n, step, of=of: x.words(i, of, step))  # type: ignore[misc]
        slab.add_offsets(lambda n, at: x.sum(i, at))

    def multiply_unit(unit: Any) -> None:
        for own in range(together):
            multiply(unit, own)

    whole = product.run() % together == 0 and product.slabs() % product.run() == 0
    with T.serial(0, T.floordiv(slabs + (together - 1), together), unroll=False) as unit:
        ring.arrive()
        if whole:
            multiply_unit(unit)
        else:
            left = held(slabs - unit * together, "int32")
            with T.If(left >= together):
                with T.Then():
                    multiply_unit(unit)
                with T.Else(), T.serial(0, left, unroll=False) as own:
                    multiply(unit, own)
        ring.leave()


def _put_strand(product: Product, sums: Any, parts: Any, turn: Any, thread: Any) -> None:
    """What a warp summed of a tile, for others to read. What is written before they have read is another place."""
    strand, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
    with T.If(lane % QUARTERS == 0), T.Then():  # lanes that have column 0, which is the row
        for i in range(2):
            place = [turn % int(parts.shape[0]), strand, T.floordiv(lane, QUARTERS) + 8 * i]
            T.buffer_store(parts, sums[2 * i], place)


def _total(product: Product, parts: Any, turn: Any, output: Any) -> Any:
    """What strands summed of an output of a tile, added in their order."""
    total = local((1,))
    T.buffer_store(total, f32(0), [0])
    for other in range(product.strands()):
        T.buffer_store(total, total[0] + parts[turn % int(parts.shape[0]), other, output], [0])
    return total[0]


def _add_strands(product: Product, parts: Any, tile: Any, turn: Any, thread: Any) -> None:
    """A tile's outputs, written."""
    barrier()
    output = tile * TILE + thread
    with T.If(tirx.all(thread < TILE, output < product.width)), T.Then():
        T.buffer_store(product.out, _total(product, parts, turn, thread), [0, output])


def _activate_strands(
    product: Product, parts: Any, tile: Any, turn: Any, thread: Any, then: Activated
) -> None:  # fmt: skip
    """Of the tiles of the last turns, what an activation makes of them; a thread has two neighbours."""
    barrier()
    pair = T.floordiv(tile * TILE, 2) + thread
    with T.If(tirx.all(thread < TILE // 2, 2 * pair < product.width // then.halves)), T.Then():
        first = turn - (then.halves - 1)
        sums = [[_total(product, parts, first + half, 2 * thread + i) for i in range(2)] for half in range(then.halves)]
        then.put(0, pair, sums)


class _Row:
    """The row of x that a warp multiplies, as operands in shared memory from word `first` on."""

    def __init__(self, product: Product, operands: Operands, memory: Any, first: Any) -> None:
        self.product, self.operands, self.memory, self.first = product, operands, memory, first
        self.lane_words = 2 * product.x_parts
        self.sums = first + product.run() * BLOCKS * STEPS * QUARTERS * self.lane_words
        self.held = local((BLOCKS * STEPS * self.lane_words,), "uint32")
        fill(self.held, u32(0))

    def make(self, slab: Any, count: Any, lane: Any) -> None:
        """`count` slabs from `slab` on, two at once: four lanes have a block of columns.

        All are asked for at once: while weights come, memory takes its time.
        """
        of_block = BlockSums(self.operands, 1)
        words = local((self.lane_words,), "uint32")
        turns = -(-self.product.run() // 2)
        together = -(-turns // -(-turns // _MOST_READS))
        with T.serial(0, -(-turns // together), unroll=False) as group, T.unroll(0, together) as each:
            own, block = (group * together + each) * 2 + T.floordiv(lane, 16), T.floordiv(lane, QUARTERS) % BLOCKS
            column = (slab + T.min(own, count - 1)) * SLAB + block * BLOCK
            found = self.product.words(0, column, self.operands)
            totals = of_block.of_block(found)
            with T.If(own < count), T.Then():
                for step in range(STEPS):
                    for at, word in enumerate(found[step]):
                        T.buffer_store(words, word, [at])
                    place = self._place(own, block, step)
                    T.buffer_store(self.memory, words[T.ramp(0, 1, self.lane_words)], [place])
                for at, total in enumerate(totals):
                    with T.If(self.operands.quarter == 0), T.Then():
                        T.buffer_store(self.memory, two_parts(total), [self._sum(own, at, block)])
        sync_warp()

    def _place(self, slab: Any, block: Any, step: int) -> Any:
        place = ((slab * BLOCKS + block) * STEPS + step) * QUARTERS + self.operands.quarter
        return T.ramp(self.first + place * self.lane_words, 1, self.lane_words)

    def _sum(self, slab: Any, at: int, block: Any) -> Any:
        return self.sums + (slab * self.product.form.offsets + at) * BLOCKS + block

    def words(self, slab: Any, block: int, step: int) -> list[Any]:
        """A lane's words for a product. Of eight rows this is the first; others are whatever was there, and not used.

        So only lanes that have the first one read: shared memory gives eight lanes' words at once.
        """
        first = (block * STEPS + step) * self.lane_words
        with T.If(self.operands.first == 0), T.Then():
            words = T.ramp(first, 1, self.lane_words)
            T.buffer_store(self.held, self.memory[self._place(slab, block, step)], [words])
        return [self.held[first + i] for i in range(self.lane_words)]

    def sum(self, slab: Any, at: int) -> Any:
        """Over the lane's own block, as two parts."""
        return held(self.memory[self._sum(slab, at, self.operands.quarter)], "uint32")
