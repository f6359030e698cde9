"""Linear layers on CUDA: weights of any format dequantized in registers and multiplied by tensor cores.

A warp multiplies 16 outputs, one tile of packed weights, with 8 rows of x at a time. Which of the 16 columns of such a
product is which is ours to choose, so lanes keep what they read: a lane has rows g and g + 8 of the tile and row g of
x, g = lane / 4, and every fourth unit of columns, four of them a step. No weight goes through shared memory.

Sums are made in one order whatever the number of rows: a slab is four units of columns, neighbouring slabs make up a
strand, which is summed from zero, and strands are added in order. With few rows each strand has a warp of its own, with
many rows each warp goes over all strands. So a row has the same bits alone and beside others, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.arguments import arguments
from llmc.targets.cuda.fragments import COLUMNS, Read, floats, pairs, products
from llmc.targets.cuda.launch import barrier, f32, fill, launch, local, shared
from llmc.targets.cuda.prelude import mma
from llmc.targets.cuda.target import WARP, CudaTarget
from llmc.targets.cuda.weights import Weights

ROWS = 8  # of x that one product takes
UNITS = 4  # of columns in a slab: one a lane of the four that share a row
MOST_STRANDS = 8
STAGED_PARTS = 4  # of steps of x that are in shared memory at once: four steps in one part, two in two parts


@dataclass(frozen=True)
class Shape:
    """What a launch does: of a block, `rows` of x by eights, and tiles of outputs of a warp."""

    most: int | None  # rows of x that it is chosen for; None: any
    rows: int
    tiles: int
    warps: int | None  # that share rows of x; None: every warp has a strand


# Few rows share no work that is worth waiting for; a batch shares dequantized weights; a prefill reads x once a block.
SHAPES = (Shape(8, 1, 1, None), Shape(64, 4, 2, None), Shape(None, 8, 2, 4))


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
    parts: tuple[int, int]  # of a weight and of a number of x
    shape: Shape

    def units(self) -> int:
        """Of columns, in a row."""
        return Weights.count_units(self.format, self.columns)

    def run(self) -> int:
        """Slabs of a strand."""
        return -(-self.slabs() // MOST_STRANDS)

    def slabs(self) -> int:
        """Of a row."""
        return -(-self.units() // UNITS)

    def strands(self) -> int:
        """Of a row: none is empty, the last one may be short."""
        return -(-self.slabs() // self.run())

    def slabs_of(self, strand: Any) -> Any:
        """How many slabs a strand has."""
        run = self.run()
        return run if self.slabs() % run == 0 else T.min(run, self.slabs() - strand * run)

    def weight_tile(self, tile: Any) -> Any:
        """A tile that there is, in place of one beyond the last."""
        return T.min(tile, tiles(self.width) - 1)

    def row(self, row: Any) -> Any:
        """A row that there is, in place of one beyond the last: it is computed again, and not written."""
        return T.min(row, self.out.shape[0] - 1)


def _few(product: _Product) -> None:
    """Every warp a strand of the same rows and outputs; x out of the caches."""
    shape, strands = product.shape, product.strands()
    grid = {
        "blockIdx.x": -(-tiles(product.width) // shape.tiles),
        "blockIdx.y": T.floordiv(product.out.shape[0] + (shape.rows * ROWS - 1), shape.rows * ROWS),
        "threadIdx.x": strands * WARP,
    }
    with launch(grid) as (outputs, block, thread):
        weights = Weights(product.format, product.columns, thread, strands * WARP)
        strand, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        first, quarter = T.floordiv(lane, 4), T.floormod(lane, 4)
        whole = weights.unit * UNITS * product.slabs() == product.columns
        sums = local((shape.rows * shape.tiles * 4,))
        fill(sums, f32(0))
        with T.serial(0, product.slabs_of(strand), unroll=False) as i:
            unit = (strand * product.run() + i) * UNITS + quarter

            def x(rows: Any, step: int, unit: Any = unit) -> list[Any]:
                row = product.row((block * shape.rows + rows) * ROWS + first)
                found = product.read(product.x, row, unit * weights.unit + step * COLUMNS, whole)
                return [word for part in found for word in part]

            _slab(product, weights, outputs * shape.tiles, unit, first, sums, x, lambda step: None)
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
        weights = Weights(product.format, product.columns, thread, threads)
        warp, lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        first, quarter = T.floordiv(lane, 4), T.floormod(lane, 4)
        count = shape.rows * shape.tiles * 4
        sums, totals = local((count,)), shared((count, threads))  # each thread's own: they would not fit in registers
        staged = _Staged(product, weights, block, thread, threads)
        tile = (outputs * warps + warp) * shape.tiles
        with T.serial(0, count) as i:
            T.buffer_store(totals, f32(0), [i, thread])
        with T.serial(0, product.strands(), unroll=False) as strand:
            fill(sums, f32(0))
            with T.serial(0, product.slabs_of(strand), unroll=False) as i:
                slab = strand * product.run() + i

                def stage(step: int, slab: Any = slab) -> None:
                    if step % staged.steps == 0:
                        staged.fill(slab, step)

                unit = slab * UNITS + quarter
                _slab(product, weights, tile, unit, first, sums, lambda n, step: staged.read(n, step, lane), stage)
            for i in range(count):
                T.buffer_store(totals, totals[i, thread] + sums[i], [i, thread])
        with T.unroll(0, shape.rows) as n:
            for own in range(shape.tiles):
                for i in range(4):
                    row = block * rows + n * ROWS + quarter * 2 + i % 2
                    output = (tile + own) * TILE + first + i // 2 * 8
                    with T.If(tirx.all(row < product.out.shape[0], output < product.width)), T.Then():
                        T.buffer_store(product.out, totals[(n * shape.tiles + own) * 4 + i, thread], [row, output])


class _Staged:
    """A few steps of a slab of x in shared memory, as lanes read them: a slot a lane, words of all parts in it.

    Lanes of a step stand side by side; those of a row's neighbouring steps, which are written together, in banks of
    their own, since a slot's place among the lanes is turned by its step.
    """

    def __init__(self, product: _Product, weights: Weights, block: Any, thread: Any, threads: int) -> None:
        self.product, self.weights, self.block, self.thread, self.threads = product, weights, block, thread, threads
        self.words = 2 * product.parts[1]
        self.steps = STAGED_PARTS // product.parts[1]
        self.rows = product.shape.rows * ROWS
        self.slots = shared((self.rows * UNITS * self.steps * self.words,), "uint32")

    def _slot(self, rows: Any, step: Any, lane: Any) -> Any:
        return T.ramp(((rows * self.steps + step) * WARP + (lane ^ (step * UNITS))) * self.words, 1, self.words)

    def fill(self, slab: Any, step: int) -> None:
        """Columns of `step` and the next steps, once all threads are done with those before."""
        unit, columns, steps = self.weights.unit, self.product.columns, self.steps
        whole = unit * UNITS * self.product.slabs() == columns
        barrier()
        with T.serial(0, self.rows * UNITS * steps // self.threads) as i:
            place = i * self.threads + self.thread
            own, quarter, row = place % steps, T.floordiv(place, steps) % UNITS, T.floordiv(place, steps * UNITS)
            column = (slab * UNITS + quarter) * unit + (step + own) * COLUMNS
            found = self.product.read(self.product.x, self.product.row(self.block * self.rows + row), column, whole)
            held = local((self.words,), "uint32")
            for at, word in enumerate(word for part in found for word in part):
                T.buffer_store(held, word, [at])
            slot = self._slot(T.floordiv(row, ROWS), own, row % ROWS * UNITS + quarter)
            T.buffer_store(self.slots, held[T.ramp(0, 1, self.words)], [slot])
        barrier()

    def read(self, rows: Any, step: int, lane: Any) -> list[Any]:
        """The words that a lane multiplies with."""
        held = local((self.words,), "uint32")
        slot = self._slot(rows, step % self.steps, lane)
        T.buffer_store(held, self.slots[slot], [T.ramp(0, 1, self.words)])
        return [held[i] for i in range(self.words)]


def _slab(
    product: _Product, weights: Weights, tile: Any, unit: Any, first: Any, sums: Any,
    x: Callable[[Any, int], list[Any]], before: Callable[[int], None],
) -> None:  # fmt: skip
    """Add a slab's products to sums, four units of columns of the warp's tiles; `x(eight rows, step)` gives words."""
    shape, (weight_parts, x_parts) = product.shape, product.parts
    if product.units() % UNITS:
        unit = T.min(unit, product.units() - 1)  # of columns that are none of x's: times zero
    streams = [
        weights.parts(product.weight, product.weight_tile(tile + own), row, unit, weight_parts)
        for own in range(shape.tiles)
        for row in (first, first + 8)
    ]
    a, b = local((shape.tiles * weight_parts * 4,), "uint32"), local((2 * x_parts,), "uint32")
    steps = weights.unit // COLUMNS
    for step in range(steps):
        before(step)
        read = [next(stream) for stream in streams]
        for own in range(shape.tiles):
            for part in range(weight_parts):
                upper, lower = read[2 * own][part], read[2 * own + 1][part]
                for i, word in enumerate((upper[0], lower[0], upper[1], lower[1])):
                    T.buffer_store(a, word, [(own * weight_parts + part) * 4 + i])
        with T.unroll(0, shape.rows) as n:
            for i, word in enumerate(x(n, step)):
                T.buffer_store(b, word, [i])
            for i, j in products(weight_parts, x_parts):  # neighbours add to other sums: none waits for the one before
                for own in range(shape.tiles):
                    mma(sums[(n * shape.tiles + own) * 4], a[(own * weight_parts + i) * 4], b[2 * j])


def _linear(shapes: list[Any], attrs: dict[str, Any], dtype: str, columns: int, read: Read, parts: Any) -> Any:
    """x, weight -> (M, N), of so many columns a row of x, which `read` reads in parts."""
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
            with T.If(out.shape[0] <= shape.most):
                with T.Then():
                    _few(product)
                with T.Else():
                    choose(*others)

        choose(*SHAPES)
    return builder.get()


def packed_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K), packed (N = width, K) -> (M, N): x in two parts of bfloat16, and weights that are not bfloat16 too."""
    columns = int(shapes[0][1])
    parts = (1 if attrs["format"] == "bf16" else 2, 2)
    return _linear(shapes, attrs, "float32", columns, floats(columns), parts)


def bf16_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """bfloat16 pairs x (M, K/2), packed (N = width, K) -> (M, N): weights are rounded to bfloat16 too."""
    count = int(shapes[0][1])
    return _linear(shapes, attrs, "int32", 2 * count, pairs(count), (1, 1))
