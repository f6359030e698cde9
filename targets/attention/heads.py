"""Kernels of latent attention: a matrix for each head, and the rows that attention reads.

The matrices of heads are one packed matrix; a tile of it multiplies with the columns of its own head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.matrices.linear import Reduce, template
from llmc.targets.matrices.reductions import PER_WORD, product_of, sliced
from llmc.targets.rows.rows import columns, copy_columns, kernel
from llmc.targets.target import Target
from llmc.targets.vector import f32, lanes, splat


def head_linear(kind: str, target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """Left operands of x (M, H S), packed weight (H N, K) -> (M, H N); N is a multiple of 16."""
    heads, count, format = int(attrs["heads"]), int(attrs["columns"]), str(attrs["format"])
    tiles = int(attrs["width"]) // heads // TILE  # of one head
    step = int(shapes[0][1]) * PER_WORD[kind] // heads
    product = product_of(kind, target, format, count)

    def body(buffers: list[Any]) -> Reduce:
        *left, weight = buffers

        def reduce(tile: Any, row: Any, rows: int) -> Any:
            own = sliced(left, kind, format, T.floordiv(tile, tiles), step, heads, count)
            return product.body([*own, weight])(tile, row, rows)

        return reduce

    return template(target, shapes, replace(product, body=body, ways=()))


def latent_rows(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """q (M, H L), rotated (M, (H + 1) P), latent (M, L) -> (M, (H + 2) (L + P))."""
    heads, size = int(attrs["heads"]), int(shapes[2][1])
    turned = int(shapes[1][1]) // (heads + 1)
    whole = size + turned

    def body(buffers: list[Any], row: Any) -> None:
        q, rotated, latent, out = buffers
        with T.serial(0, heads) as head:
            copy_columns(q, out, row, head * size, size, to=head * whole)
        for part in (heads, heads + 1):
            copy_columns(latent, out, row, 0, size, to=part * whole)
        with T.serial(0, heads + 1) as head:
            copy_columns(rotated, out, row, head * turned, turned, to=head * whole + size)
        _clear(out, (heads + 1) * whole + size, row, turned)

    return kernel(["float32"] * 4, shapes, body)


def _clear(out: Any, to: Any, row: Any, count: int) -> None:
    """Zeros in `count` columns of a row of out from `to` on."""
    columns(
        count,
        lambda c: T.buffer_store(out, splat(f32(0)), [row, lanes(to + c)]),
        lambda c: T.buffer_store(out, f32(0), [row, to + c]),
    )


KERNELS: dict[str, Any] = {
    **{f"{kind}_head_linear": partial(head_linear, kind) for kind in PER_WORD},
    "latent_rows": latent_rows,
}
