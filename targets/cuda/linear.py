"""Linear layers on CUDA: packed weights as operands of tensor cores, out of any format.

A warp multiplies 16 outputs, one tile of packed weights, with 8 rows of x at a time. Which of the 16 columns of such a
product is which is ours to choose, so lanes make operands of the very weights that they multiply (operands.py), and of
x likewise (fragments.py).

Of block formats products are of whole numbers and x: a sum over the columns that share a scale is multiplied with that,
and stored offsets are weights of columns of their own, whose x is the sum of the block's x.

The number of rows chooses launches: of one, blocks stay and weights come all the time (one_row.py). Of two to eight
each warp has a part of the columns, and makes operands of x as it goes (strands.py). Of up to 64 by codes blocks keep
operands of x where tensor cores read them there (batch.py). Of more a launch writes them first (image.py), for the
launch of few rows with more of them, or for one that goes over all columns in each warp (prefill.py), or in groups of
four warps (warpgroups.py). All add in the same order (product.py).

Where an activation follows, it is of what a block has summed of one row (one_row.py), of what the launch that adds
strands of a batch has (batch.py), and else a launch of its own.
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
from llmc.targets.cuda.activated import Activated
from llmc.targets.cuda.elementwise import ACTIVATED, Activation
from llmc.targets.cuda.fragments import Read, floats, pairs
from llmc.targets.cuda.image import Image
from llmc.targets.cuda.launch import by_rows
from llmc.targets.cuda.operands import Form
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.strands import Shape, multiply_few
from llmc.targets.cuda.target import CudaTarget

FEW, BATCH = Shape(1, 1), Shape(4, 2)  # shapes of blocks of few rows, and of a batch
BATCH_ROWS = 64  # the most of a batch


def _linear(
    target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], dtype: str, columns: int, read: Read, parts: int,
    activation: Activation | None = None,
) -> Any:  # fmt: skip
    """x, weight -> (M, N), of so many columns a row of x, which `read` reads in so many parts.

    Where an activation follows: what that makes of the result, as bfloat16 pairs.
    """
    matrix = {"f32": "float32"}.get(str(attrs["format"]), "int32")
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments([dtype, matrix, "int32" if activation else "float32"], shapes)
        form, width = Form(str(attrs["format"])), int(attrs["width"])
        results = T.alloc_buffer((x.shape[0], width)) if activation else out
        product = Product(x, weight, results, form, width, columns, read, parts)
        then = Activated(activation, attrs, out) if activation else None
        groups, size = warpgroups.fitted(target, product), prefill.fitted(target, product)
        many = groups or size
        image = Image(product, many.rows)
        few, some = (shape.fitted(target, product) for shape in (FEW, BATCH))
        joined = then if then is not None and then.fits(width) else None
        one = one_row.fitted(target, product, joined) if joined is then else None
        staying = batch.fitted(target, product, BATCH.rows)
        found = None if staying is None else batch.Strands(product, BATCH.rows, BATCH_ROWS)

        def finish() -> None:
            if then is not None:
                then.launch(results)

        def multiply_eight() -> None:
            multiply_few(product, few, None)
            finish()

        def multiply_batch() -> None:
            if staying is not None and found is not None:
                batch.multiply_batch(target, product, staying, found, joined)
                if joined is None:
                    finish()
            else:
                image.write(some.rows)
                multiply_few(product, some, image)
                finish()

        def write_and_multiply_many() -> None:
            image.write(many.rows, apart=groups is not None)
            if groups is not None:
                warpgroups.multiply_most(product, image, groups)
            else:
                prefill.multiply_many(product, image, size)
            finish()

        launches: list[tuple[int, Callable[[], None]]] = []
        if one is not None:
            launches.append((1, partial(one_row.multiply_one, target, product, one, joined)))
        launches += [(FEW.rows * ROWS, multiply_eight), (BATCH_ROWS, multiply_batch)]
        by_rows(out.shape[0], launches, write_and_multiply_many)
    return builder.get()


def packed_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K), packed (N = width, K) -> (M, N): x in two parts of bfloat16."""
    columns = int(shapes[0][1])
    return _linear(target, shapes, attrs, "float32", columns, floats(columns), 2)


def bf16_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """bfloat16 pairs x (M, K/2), packed (N = width, K) -> (M, N)."""
    count = int(shapes[0][1])
    return _linear(target, shapes, attrs, "int32", 2 * count, pairs(count), 1)


def activated_linear(name: str, target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """As `bf16_linear`, and then an op of ACTIVATED: -> bfloat16 pairs (M, width / halves / 2)."""
    count = int(shapes[0][1])
    return _linear(target, shapes, attrs, "int32", 2 * count, pairs(count), 1, ACTIVATED[name])
