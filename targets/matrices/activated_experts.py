"""Gated experts: gate and up, the activation and its rounding to int8 before anything leaves the caches.

As activated_linear.py does for an MLP. What a thread has at a time are some columns of an expert, in groups of 64, and
all its pairs, or a panel of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import GROUP, TILE
from llmc.compiler.ops.quantized import after_experts
from llmc.targets.arguments import arguments
from llmc.targets.matrices.block_linear import format_of, i8_product
from llmc.targets.matrices.experts import ROW_BLOCK, SHARES
from llmc.targets.matrices.linear import Write, get
from llmc.targets.matrices.pair_products import PANEL, Left, Multiply, PairProduct, slices, tile_of
from llmc.targets.matrices.pairs import Pairs
from llmc.targets.parallel import forget_registers, parallel
from llmc.targets.rows.elementwise import ACTIVATIONS, Activation
from llmc.targets.rows.rounding import INT8, Rounding
from llmc.targets.target import Target
from llmc.targets.vector import f32, i32, lanes, registers, splat

_TILES = GROUP // TILE  # of a group of columns
# Of few pairs, so many groups of columns at once: the longer what is read in order of memory, the better.
_GROUPS = 8
_PAIRS = PANEL // _GROUPS  # as many pairs are few: sums take as much room as those of a panel and one group


def gated_i8_experts(
    activation: Activation, rounding: Rounding, biased: bool, target: Target, shapes: list[Any], attrs: dict[str, Any]
) -> tirx.PrimFunc:
    """Left operands of x (M, C), ids (M, U), packed gate and up (E F, C) -> (M, U F) as int8.

    `biased`: gate's and up's biases (E F,) come after these, and are added before the activation.
    """
    inner = int(shapes[0][1]) * 4
    product = i8_product(target, format_of(attrs), inner)
    groups = int(attrs["width"]) // GROUP
    combine = activation.of(attrs)
    parts = [replace(part, step=0) for part in slices("i8", attrs["format"], inner, 1)]
    with IRBuilder() as builder, T.prim_func():
        types = [*product.dtypes[:-1], "int32", *product.dtypes[-1:] * 2, *["float32"] * 2 * biased, *rounding.dtypes]
        given = arguments(types, shapes)
        quantized, given = given[-len(rounding.dtypes) :], given[: -len(rounding.dtypes)]
        biases, given = (given[-2:], given[:-2]) if biased else ([], given)
        *left, ids, gate, up = given
        pairs = Pairs(ids, ROW_BLOCK, int(attrs["experts"]))
        with T.serial(0, T.ceildiv(shapes[0][0], ROW_BLOCK)) as block:
            start = block * ROW_BLOCK
            pairs.sort(start, T.min(shapes[0][0] - start, ROW_BLOCK))
            own = PairProduct(product, Left(left, parts, pairs, start), target)

            def write(at: Any, group: Any, numbers: list[Any], start: Any = start) -> None:
                """Give 64 columns of the `at`-th pair."""
                rounding.group(numbers, start + pairs.row(at), pairs.place(at) * groups + group, quantized)

            nothing = [combine(splat(f32(0)), splat(f32(0)))] * _TILES
            with T.If(pairs.ends[0] > 0), T.Then(), parallel(target, pairs.ends[0]) as at, T.serial(0, groups) as group:
                write(at, group, nothing)
            with parallel(target, SHARES) as share, T.serial(0, pairs.many[0]) as number:
                expert = pairs.there[number]
                first, end = pairs.tiles_of(share, SHARES, number, groups)

                def some(
                    multiply: Multiply, together: int, at: Any, count: Any, expert: Any = expert, first: Any = first,
                    end: Any = end, write: Any = write,
                ) -> None:  # fmt: skip
                    once = T.Select(T.cast(count, "int32") <= _PAIRS, tirx.const(_GROUPS, "int32"), i32(1))
                    with T.serial(0, T.ceildiv(end - first, once)) as turn:
                        begin = first + turn * once
                        here = T.min(once, end - begin)
                        sums = registers((2 * PANEL * _TILES * TILE,), "float32")  # (pairs, parts, tiles, 16)

                        def place(pair: Any, part: int, tile: Any) -> Any:
                            return lanes(((pair * 2 + part) * (once * _TILES) + tile) * TILE)

                        for part, weight in enumerate((gate, up)):
                            with T.serial(0, T.floordiv(here * _TILES, together)) as some_tiles:

                                def keep(tile: Any, found: Any, pair: Any, rows: int, part: int = part) -> None:
                                    for r in range(rows):
                                        T.buffer_store(sums, get(found, r), [place(pair + r, part, tile)])

                                tiles = [some_tiles * together + i for i in range(together)]
                                own = [tile_of(expert, groups * _TILES, begin * _TILES + tile) for tile in tiles]
                                writes: list[Write] = [partial(keep, tile) for tile in tiles]
                                multiply(weight, own, writes)
                        forget_registers(target)

                        def number(pair: Any, part: int, group: Any, tile: int, begin: Any = begin) -> Any:
                            found = sums[place(pair, part, group * _TILES + tile)]
                            if not biased:
                                return found
                            column = ((expert * groups + begin + group) * _TILES + tile) * TILE
                            return found + biases[part][lanes(column)]

                        with T.serial(0, count) as pair, T.serial(0, here) as group:
                            numbers = [
                                combine(*(number(pair, part, group, tile) for part in range(2)))
                                for tile in range(_TILES)
                            ]
                            write(at + pair, begin + group, numbers)

                with T.If(first < end), T.Then():
                    own.each(expert, some)
    return builder.get()


KERNELS: dict[str, Any] = {
    after_experts(name + ending, biased): partial(gated_i8_experts, activation, rounding, biased)
    for name, activation in ACTIVATIONS.items()
    if activation.parts == 2
    for ending, rounding in INT8.items()
    for biased in (False, True)
}
