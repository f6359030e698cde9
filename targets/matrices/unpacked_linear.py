"""Linear layers over block formats with activations in bfloat16, on tile registers (unpacked_products.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.ops.narrowed import after_linear
from llmc.compiler.ops.rounded import ENDING, LINEAR
from llmc.targets import tiles
from llmc.targets.arguments import arguments
from llmc.targets.matrices.block_linear import format_of
from llmc.targets.matrices.codes import CHUNK
from llmc.targets.matrices.linear import Results, get, tile_bytes
from llmc.targets.matrices.unpacked import JOIN
from llmc.targets.matrices.unpacked_products import BLOCK, FEW, TOGETHER, Left, Many, Matrix, few
from llmc.targets.parallel import parallel
from llmc.targets.rows.elementwise import ACTIVATIONS, Activation
from llmc.targets.rows.rounding import store_bf16
from llmc.targets.target import Target
from llmc.targets.vector import imported, lanes, prefetch

_SERIAL = 8  # rows up to which one thread makes results of all sums: others would take longer to begin


def can_multiply(target: Target, pairs: int) -> bool:
    """Whether there are tiles of bfloat16 and the columns, in pairs, are whole chunks."""
    return target.has_bf16_tiles and 2 * pairs % CHUNK == 0


def unpacked_linear(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K/2) bfloat16 pairs, packed weight (T, words) -> (M, width), where `can_multiply`."""
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments(["int32", "int32", "float32"], shapes)
        matrix = Matrix(target, format_of(attrs), weight, int(shapes[0][1]))

        def tile(turn: Any, number: Any) -> Any:
            return T.min(turn * TOGETHER + number, matrix.tiles - 1)

        def results(turn: Any) -> list[Results]:
            return [Results(out, tile(turn, number)) for number in range(TOGETHER)]

        def ask(turn: Any, row: Any) -> None:
            for result in results(turn):
                result.ask(row)

        def finish(turn: Any, many: Many, start: Any, row: Any) -> None:
            for number, result in enumerate(results(turn)):
                result(many.row(row, number), start + row, 1)

        rows = shapes[0][0]
        with T.If(rows <= FEW):
            with T.Then():
                _few_rows(matrix, x, rows, out)
            with T.Else():
                _many_rows(matrix, x, rows, -(-matrix.tiles // TOGETHER), tile, ask, finish)
    return builder.get()


def activated_unpacked_linear(
    activation: Activation, target: Target, shapes: list[Any], attrs: dict[str, Any]
) -> tirx.PrimFunc:
    """The same operands -> what `activation` makes of the result, bfloat16 pairs; its columns are whole groups."""
    combine, parts = activation.of(attrs), activation.parts
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments(["int32", "int32", "int32"], shapes)
        matrix = Matrix(target, format_of(attrs), weight, int(shapes[0][1]))
        each = matrix.tiles // parts  # tiles of a part: what a tile of results is made of is so many apart
        own = TOGETHER // parts  # tiles of results of a turn

        def tile(turn: Any, number: Any) -> Any:
            part, inside = T.floordiv(number, own), T.floormod(number, own)
            return T.min(part * each + turn * own + inside, matrix.tiles - 1)

        def ask(turn: Any, row: Any) -> None:
            prefetch(out.access_ptr("r", offset=row * int(out.shape[1]) + turn * own * (TILE // 2)))

        def finish(turn: Any, many: Many, start: Any, row: Any) -> None:
            for at in range(own):
                sums = [get(many.row(row, part * own + at), 0) for part in range(parts)]
                store_bf16(combine(*sums), out, start + row, (turn * own + at) * TILE)

        rows = shapes[0][0]
        with T.If(rows <= FEW):
            with T.Then():
                sums = T.alloc_buffer((FEW, matrix.tiles * TILE), "float32")
                _few_rows(matrix, x, rows, sums)

                def row(row: Any) -> None:
                    with T.serial(0, each) as at:
                        found = [sums[row, lanes((part * each + at) * TILE)] for part in range(parts)]
                        store_bf16(combine(*found), out, row, at * TILE)

                with T.If(rows <= _SERIAL):
                    with T.Then(), T.serial(0, rows) as number:
                        row(number)
                    with T.Else(), parallel(target, rows) as number:
                        row(number)
            with T.Else():
                _many_rows(matrix, x, rows, each // own, tile, ask, finish)
    return builder.get()


def _few_rows(matrix: Matrix, x: Any, rows: Any, out: Any) -> None:
    with _turns(matrix, matrix.tiles, 1) as tile:
        few(matrix, x, rows, tile, Results(out, tile))


def _many_rows(matrix: Matrix, x: Any, rows: Any, turns: int, tile: Any, ask: Any, finish: Any) -> None:
    """Blocks of rows times TOGETHER tiles a turn: `tile(turn, number)`."""
    left = Left(matrix)
    with T.serial(0, T.ceildiv(rows, BLOCK)) as block:
        start = block * BLOCK
        count = T.min(rows - start, BLOCK)
        with parallel(matrix.target, T.ceildiv(count, tiles.ROWS)) as group:
            left.copy(x, start, count, group)
        with _turns(matrix, turns, TOGETHER) as turn:
            many = Many(matrix, left, count, partial(tile, turn), partial(tile, turn + 1))
            many.multiply(lambda row: ask(turn, start + row), partial(finish, turn, many, start))


@contextmanager
def _turns(matrix: Matrix, turns: int, together: int) -> Iterator[Any]:
    """A turn for so many tiles of outputs each."""
    with parallel(matrix.target, turns, together * tile_bytes(matrix.weight)) as turn, imported(JOIN):
        yield turn


KERNELS: dict[str, Any] = {
    after_linear(LINEAR, name + ENDING): partial(activated_unpacked_linear, activation)
    for name, activation in ACTIVATIONS.items()
}
