"""Linear layers over bfloat16 weights on tile registers (tiles.py): packed weights are tiles as they lie.

What a tile instruction adds up it adds in an order of its own. A row by itself, which tiles would serve no faster than
memory does, is summed in that order too, so that it has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets import tiles
from llmc.targets.matrices.linear import Many, Product, Reduce, Write, get, put, zeros
from llmc.targets.matrices.streams import ask_ahead
from llmc.targets.target import Target
from llmc.targets.vector import bf16_halves, fma, lanes, registers, splat

_LEAST = 2  # rows from which tiles are used
_GROUP = 4  # rows of a group where they are not, as when they are parts of rows
_ROWS = tiles.BF16_GROUPS * tiles.ROWS  # at once


def can_multiply(target: Target, pairs: int) -> bool:
    """Whether there are tiles of bfloat16 and the columns, in pairs, are whole ones."""
    return tiles.are_there_for_bf16(target) and pairs % tiles.BF16_PAIRS == 0


def tile_product(target: Target, pairs: int) -> Product:
    """The product of bf16_linear, where `can_multiply`."""

    def many(buffers: list[Any], outputs: list[Any], start: Any, count: Any, writes: list[Write]) -> None:
        (x, weight), (tile,), (write,) = buffers, outputs, writes
        with T.serial(0, T.ceildiv(count, _ROWS)) as block:
            first = block * _ROWS
            here = T.min(count - first, _ROWS)
            for groups in range(1, tiles.BF16_GROUPS + 1):
                with T.If(T.ceildiv(here, tiles.ROWS) == groups), T.Then():
                    _multiply(target, pairs, x, weight, tile, start + first, here, groups, write)

    return Product(["int32", "int32"], _body(target, pairs), more=0, usual=_GROUP, ways=(Many(_LEAST, many),))


def _multiply(
    target: Target, pairs: int, x: Any, weight: Any, tile: Any, start: Any, count: Any, groups: int, write: Write
) -> None:
    """`count` rows from `start` on, in so many groups of which the last may be smaller, times a tile of outputs."""
    tiles.configure_bf16([tiles.ROWS] * (groups - 1) + [count - tiles.ROWS * (groups - 1)])
    with T.serial(0, pairs // tiles.BF16_PAIRS) as step:
        column = step * tiles.BF16_PAIRS
        place = (tile * pairs + column) * TILE
        for line in range(tiles.BF16_PAIRS):
            ask_ahead(target, weight, place + line * TILE, quick=False)
        tiles.add_bf16(x, start, column, weight, place, groups)
    sums = registers((_ROWS * TILE,), "float32")
    tiles.store_bf16(sums, groups)
    tiles.release()
    with T.serial(0, count) as row:
        acc = registers((TILE,), "float32")
        put(acc, 0, sums[lanes(row * TILE)])
        write(acc, start + row, 1)


def _body(target: Target, pairs: int) -> Callable[[list[Any]], Reduce]:
    """Buffers (x, weight) -> the reduction in the order of `tiles.add_bf16`, by vectors."""

    def body(buffers: list[Any]) -> Reduce:
        x, weight = buffers

        def reduce(tile: Any, row: Any, rows: int) -> Any:
            acc = zeros(rows, "float32")
            with T.serial(0, pairs // tiles.BF16_PAIRS) as step:
                sums = [zeros(rows, "float32") for _ in range(2)]  # of odd columns, of even ones
                for pair in range(tiles.BF16_PAIRS):
                    k = step * tiles.BF16_PAIRS + pair
                    ask_ahead(target, weight, (tile * pairs + k) * TILE, rows <= target.knobs.few_rows)
                    words = bf16_halves(weight[tile, k, lanes(0)])
                    for r in range(rows):
                        left = bf16_halves(splat(x[row + r, k]))
                        for part in range(2):
                            put(sums[part], r, fma(left[part], words[part], get(sums[part], r)))
                for r in range(rows):
                    put(acc, r, get(acc, r) + (get(sums[1], r) + get(sums[0], r)))
            return acc

        return reduce

    return body
