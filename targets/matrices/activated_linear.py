"""Linear layers whose outputs go through an activation and to int8 before they leave the caches.

A turn makes the sums of the outputs that 64 columns are made of, for all rows of a block of rows, and then the columns:
a gated layer's from as many of its gate and of what that gates. Few rows go through the tiles in the order of memory
instead, and their sums, which are few too, wait for the columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import GROUP, TILE
from llmc.compiler.ops.narrowed import after_linear
from llmc.compiler.ops.quantized import LINEAR
from llmc.targets.arguments import arguments
from llmc.targets.matrices.block_linear import format_of, i8_product
from llmc.targets.matrices.linear import RowsOfTiles, Write, get, tile_bytes
from llmc.targets.parallel import forget_registers, parallel
from llmc.targets.rows.elementwise import ACTIVATIONS, Activation
from llmc.targets.rows.rounding import INT8, Rounding, whole_groups
from llmc.targets.target import Target
from llmc.targets.vector import lanes, registers

_TILES = GROUP // TILE  # of a group of columns
# Up to so many rows weights are done with as fast as memory brings them, which it does best in their order: measured.
_IN_ORDER = 8


def activated_i8_linear(
    activation: Activation, rounding: Rounding, target: Target, shapes: list[Any], attrs: dict[str, Any]
) -> tirx.PrimFunc:
    """Operands of i8_linear -> what `activation` makes of its result (M, width), as int8."""
    combine = activation.of(attrs)
    width = whole_groups([0, attrs["width"]]) // activation.parts
    product = i8_product(target, format_of(attrs), int(shapes[0][1]) * 4)
    each = activation.parts * _TILES  # tiles of a turn
    with IRBuilder() as builder, T.prim_func():
        buffers = arguments([*product.dtypes, *rounding.dtypes], shapes)
        (*left, weight), quantized = buffers[: len(product.dtypes)], buffers[len(product.dtypes) :]
        rows, size = shapes[0][0], target.knobs.row_block
        apart = size + 1  # registers of a tile's sums: with a power of two all tiles of a row would share a cache set
        turn_bytes = each * tile_bytes(weight)
        waiting = T.alloc_buffer((_IN_ORDER * activation.parts * width,), "float32")  # sums (rows, tiles, 16)

        def finish(row: Any, group: Any, sums: Any, first: Any, step: Any, apart: int = 1) -> None:
            """Write a group of columns of a row, whose tiles' sums are `apart` registers from one another.

            Those of a part begin `step` registers behind those of the part before.
            """
            parts = [first + part * step for part in range(activation.parts)]
            numbers = [combine(*(sums[lanes((at + tile * apart) * TILE)] for at in parts)) for tile in range(_TILES)]
            rounding.group(numbers, row, group, quantized)

        with T.serial(0, T.ceildiv(rows, size)) as block:
            start = block * size
            count = T.min(rows - start, size)

            def turns(rows_of_tiles: RowsOfTiles, together: int, start: Any = start, count: Any = count) -> None:
                with parallel(target, width // GROUP, turn_bytes) as turn:
                    sums = registers((each * apart * TILE,), "float32")  # (tiles, rows, 16)
                    with T.serial(0, each // together) as some:
                        numbers = [some * together + i for i in range(together)]

                        def place(number: Any) -> Any:
                            part, tile = T.floordiv(number, _TILES), T.floormod(number, _TILES)
                            own = part * (width // TILE) + turn * _TILES + tile
                            return T.Select(rows <= _IN_ORDER, turn * each + number, own)

                        def write(number: Any, found: Any, row: Any, rows: int) -> None:
                            for r in range(rows):
                                at = lanes((number * apart + row + r - start) * TILE)
                                T.buffer_store(sums, get(found, r), [at])

                        writes: list[Write] = [partial(write, number) for number in numbers]
                        rows_of_tiles(weight, [place(number) for number in numbers], writes)
                    forget_registers(target)
                    with T.serial(0, count) as row, T.If(rows <= _IN_ORDER):
                        with T.Then(), T.serial(0, each) as number:
                            place = (row * activation.parts * (width // TILE) + turn * each + number) * TILE
                            T.buffer_store(waiting, sums[lanes((number * apart + row) * TILE)], [lanes(place)])
                        with T.Else():
                            finish(start + row, turn, sums, row, _TILES * apart, apart)

            product.each_way(target, left, start, count, partial(parallel, target), turns)
        with T.If(rows <= _IN_ORDER), T.Then(), T.serial(0, rows) as row, T.serial(0, width // GROUP) as group:
            tiles = width // TILE
            finish(row, group, waiting, row * activation.parts * tiles + group * _TILES, tiles)
    return builder.get()


KERNELS: dict[str, Any] = {
    after_linear(LINEAR, name + ending): partial(activated_i8_linear, activation, rounding)
    for name, activation in ACTIVATIONS.items()
    for ending, rounding in INT8.items()
}
