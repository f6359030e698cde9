"""Linear layers on CUDA: packed weights as operands of tensor cores, out of any format.

A warp multiplies 16 outputs, one tile of packed weights, with 8 rows of x at a time. Which of the 16 columns of such a
product is which is ours to choose, so lanes make operands of the very weights that they multiply (operands.py), and of
x likewise (fragments.py).

Of block formats products are of whole numbers and x: a sum over the columns that share a scale is multiplied with that,
and stored offsets are weights of columns of their own, whose x is the sum of the block's x.

The number of rows chooses launches: of one to eight each warp has a part of the columns, and makes operands of x as it
goes (strands.py). Of more a launch writes them first (image.py), for the same launch with more rows, or for one that
goes over all columns in each warp (prefill.py), or in groups of four warps (warpgroups.py). All add in the same order
(product.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.arguments import arguments
from llmc.targets.cuda import batch, one_row, prefill, warpgroups
from llmc.targets.cuda.batch_rows import Size
from llmc.targets.cuda.fragments import Read, floats, pairs
from llmc.targets.cuda.image import Image
from llmc.targets.cuda.operands import Form
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.strands import Shape, multiply_few
from llmc.targets.cuda.target import CudaTarget

FEW, BATCH = Shape(1, 1), Shape(4, 2)  # shapes of blocks of few rows, and of a batch
BATCH_ROWS = 64  # the most of a batch


def _linear(
    target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], dtype: str, columns: int, read: Read, parts: int
) -> Any:
    """x, weight -> (M, N), of so many columns a row of x, which `read` reads in so many parts."""
    matrix = {"f32": "float32"}.get(str(attrs["format"]), "int32")
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments([dtype, matrix, "float32"], shapes)
        product = Product(x, weight, out, Form(str(attrs["format"])), int(attrs["width"]), columns, read, parts)
        groups, size = warpgroups.fitted(target, product), prefill.fitted(target, product)
        many = groups or size
        image = Image(product, many.rows)
        sizes = [batch.fitted(target, product, shape.rows) for shape in (FEW, BATCH)]
        found = batch.Strands(product, BATCH.rows, BATCH_ROWS) if any(sizes) else None

        def multiply_some(shape: Shape, size: Size | None) -> None:
            if size is not None and found is not None:
                batch.multiply_batch(target, product, size, found)
                return
            shape = shape.fitted(target, product)
            if shape.rows > FEW.rows:
                image.write(shape.rows)
            multiply_few(product, shape, image if shape.rows > FEW.rows else None)

        def write_and_multiply_many() -> None:
            image.write(many.rows, apart=groups is not None)
            if groups is not None:
                warpgroups.multiply_most(product, image, groups)
            else:
                prefill.multiply_many(product, image, size)

        one = one_row.fitted(target, product)
        launches: list[tuple[int, Callable[[], None]]] = []
        if one is not None:
            launches.append((1, partial(one_row.multiply_one, target, product, one)))
        launches.append((FEW.rows * ROWS, partial(multiply_some, FEW, sizes[0])))
        launches.append((BATCH_ROWS, partial(multiply_some, BATCH, sizes[1])))
        _by_rows(out.shape[0], launches, write_and_multiply_many)
    return builder.get()


def _by_rows(rows: Any, launches: list[tuple[int, Callable[[], None]]], most: Callable[[], None]) -> None:
    """The first of these launches that is for at most as many rows as there are, or that of `most` rows."""
    if not launches:
        most()
        return
    (count, launch), *others = launches
    with T.If(rows <= count):
        with T.Then():
            launch()
        with T.Else():
            _by_rows(rows, others, most)


def packed_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K), packed (N = width, K) -> (M, N): x in two parts of bfloat16."""
    columns = int(shapes[0][1])
    return _linear(target, shapes, attrs, "float32", columns, floats(columns), 2)


def bf16_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """bfloat16 pairs x (M, K/2), packed (N = width, K) -> (M, N)."""
    count = int(shapes[0][1])
    return _linear(target, shapes, attrs, "int32", 2 * count, pairs(count), 1)
