"""Products of many rows on CUDA where tensor cores take operands of four warps at once (`wgmma`).

A group of four warps multiplies 64 outputs, a tile of each warp, with all rows of a block: weights out of registers, as
`mma` has them (operands.py), x out of shared memory, where it comes ahead. While tensor cores multiply, warps make the
next weights, and multiply the sums before with their scales. Words of weights are read a slab ahead.

A warp goes over one strand after another, and has what it has summed of those before in shared memory, and in what
registers are left (prefill.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.cuda.image import Image
from llmc.targets.cuda.launch import after_launches, dynamic, f32, fill, fma, lanes, launch, local, stored, together
from llmc.targets.cuda.operands import STEPS, Coded, Operands, Plain
from llmc.targets.cuda.prefill import Totals
from llmc.targets.cuda.prelude import begin_group_products, commit_group_products, wait_group_products
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.slab import Slab, put_offsets
from llmc.targets.cuda.stream import BLOCKS
from llmc.targets.cuda.target import WARP, CudaTarget
from llmc.targets.cuda.weights_ahead import WeightsAhead
from llmc.targets.cuda.x_ahead import XAhead, stage_words

WARPS = 8  # of a block: two groups
THREADS = WARPS * WARP
KEPT = 32  # totals of a thread that registers have room for
RESERVED = 1 << 8  # bytes of shared memory for counts of arrivals


@dataclass(frozen=True)
class Size:
    """Of a block: rows of x by eights, stages for 32 columns of x, and a thread's totals that are in registers."""

    rows: int
    stages: int
    kept: int

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.rows * 4

    @property
    def totals(self) -> int:
        """Words of shared memory for the others."""
        return THREADS * (self.sums - self.kept)

    def words(self, product: Product) -> int:
        """Of shared memory."""
        return self.totals + self.stages * stage_words(product, self.rows)


def fitted(target: CudaTarget, product: Product) -> Size | None:
    """The size that fits a multiprocessor; None where tensor cores take no such operands, or weights have two parts."""
    if not target.wgmma or product.form.parts > 1:
        return None
    # Unscaled sums take twice as many registers as sums do; where there are none, some are left.
    rows, kept = (16, 0) if product.form.run else (32, KEPT)
    room = target.shared_bytes - product.form.value_bytes - RESERVED
    sizes = (Size(rows, stages, kept) for stages in (8, 7, 6, 5, 4))
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
        operands = Operands(product.form, thread, THREADS, beside=True)
        tile = outputs * WARPS + T.floordiv(thread, WARP)
        memory, sums = dynamic(size.words(product), product.form.value_bytes), local((size.sums,))
        totals = Totals(memory, thread, THREADS, size.sums, size.kept)
        x = XAhead(product, image, size.rows, size.stages, memory, size.totals, block, thread)
        weights = WeightsAhead(product, operands, tile)
        slab = Slab(operands, size.rows, 1, product.x_parts, sums)
        weights.load(0)
        x.prepare(WARPS)
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
                else:
                    _multiply_numbers(slab, own, x, index)
        _write(product, operands, tile, block * rows, totals, sums)


def _write(product: Product, operands: Operands, tile: Any, first: Any, totals: Totals, sums: Any) -> None:
    """All sums of a thread, of rows of x from `first` on: outputs side by side together, where rows have pairs of them.

    Sum i is of output i // 2 % 2 of the lane's two, and of an eight of rows of x row 2 q + i % 2.
    """
    several = tirx.const(product.strands() > 1, "bool")
    beside = 2 - product.width % 2
    columns = [stored(tile * TILE + operands.row(own), beside) for own in range(3 - beside)]
    for i in (i for i in range(totals.count) if i // 2 % 2 < len(columns)):
        row, output = first + i // 4 * ROWS + operands.quarter * 2 + i % 2, tile * TILE + operands.row(i // 2 % 2)
        found = local((beside,))
        for own in range(beside):
            T.buffer_store(found, totals.before(i + 2 * own, several) + sums[i + 2 * own], [own])
        with T.If(tirx.all(row < product.out.shape[0], output < product.width)), T.Then():
            T.buffer_store(product.out, found[lanes(0, beside)], [row, columns[i // 2 % 2]])


def _multiply_numbers(slab: Slab, weights: Plain, x: XAhead, index: Any) -> None:
    """A slab of weights that are numbers, added to sums."""
    a = [local((STEPS * 4,), "uint32") for _ in range(2)]
    for block in range(BLOCKS):
        own = a[block % 2]
        for i, word in enumerate(word for step in weights.words(block) for word in step[0]):
            T.buffer_store(own, word, [i])
        x.next(index, block)
        begin_group_products(own, STEPS * 4)
        for step in range(STEPS):
            for part in reversed(range(slab.x_parts)):
                x.multiply(slab.sums, own[step * 4], step, part, 1)
        commit_group_products()
        if block:
            wait_group_products(1)
            x.release(index, block - 1)
    # Sums on their way into the next turn of a loop would have ptxas wait for each product by itself.
    wait_group_products(0, slab.sums, slab.rows * ROWS)
    x.release(index, BLOCKS - 1)


def _multiply_codes(slab: Slab, weights: Coded, x: XAhead, index: Any) -> None:
    """A slab of codes: sums of a run of products wait for its scale, those of two runs by turns."""
    run, offsets = slab.operands.form.run, slab.operands.form.offsets
    partial = [local((slab.rows * 4,)) for _ in range(2)]
    a = [local((run * 4,), "uint32") for _ in range(2)]
    waiting: list[int] = []  # the last step of a run whose products are on their way

    def settle(left: int) -> None:
        """Scale the first run that waits; so many others are on their way."""
        step = waiting.pop(0)
        own = step // run % 2
        wait_group_products(left, partial[own], slab.rows * ROWS)
        if step % STEPS == STEPS - 1 and not (offsets and step == BLOCKS * STEPS - 1):
            x.release(index, step // STEPS)
        scales = weights.scale(step)
        with T.unroll(0, slab.rows * 4) as i:
            scale = T.Select(i % 4 < 2, scales[0], scales[1])
            T.buffer_store(slab.sums, fma(scale, partial[own][i], slab.sums[i]), [i])

    for block in range(BLOCKS):
        words = weights.words(block)
        x.next(index, block)
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
    if offsets:
        _add_offsets(slab, weights, x)
        x.release(index, BLOCKS - 1)


def _add_offsets(slab: Slab, weights: Coded, x: XAhead) -> None:
    """Products of a slab's stored offsets and sums of x."""
    a = local((4,), "uint32")
    for at in range(slab.operands.form.offsets):
        put_offsets(weights, at, a, 0)
        begin_group_products(a, 4)
        x.multiply_sums(slab.sums, a[0], at)
        commit_group_products()
        wait_group_products(0, slab.sums, slab.rows * ROWS)
