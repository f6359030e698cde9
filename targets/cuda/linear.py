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
from llmc.targets.cuda.elementwise import ACTIVATED
from llmc.targets.cuda.fragments import floats, pairs
from llmc.targets.cuda.image import Image
from llmc.targets.cuda.launch import by_rows
from llmc.targets.cuda.operands import Form
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.strands import Shape, multiply_few
from llmc.targets.cuda.target import CudaTarget

FEW, BATCH = Shape(1, 1), Shape(4, 2)  # shapes of blocks of few rows, and of a batch
BATCH_ROWS = 64  # the most of a batch


class _Linear:
    """A linear layer's launches, with an activation behind it, if there is one; made in a PrimFunc, outside of them."""

    def __init__(self, target: CudaTarget, product: Product, then: Activated | None = None) -> None:
        self.target, self.product, self.then = target, product, then
        self.groups, self.many = warpgroups.fitted(target, product), prefill.fitted(target, product)
        self.image = Image(product, (self.groups or self.many).rows)
        self.few, self.some = (shape.fitted(target, product) for shape in (FEW, BATCH))
        self.joined = then if then is not None and then.fits(product.width) else None
        self.one = one_row.fitted(target, product, self.joined) if self.joined is then else None
        self.staying = batch.fitted(target, product, BATCH.rows)
        self.found = None if self.staying is None else batch.Strands(product, BATCH.rows, BATCH_ROWS)

    def launch(self) -> None:
        """Those for the number of rows."""
        launches: list[tuple[int, Callable[[], None]]] = []
        if self.one is not None:
            launches.append((1, partial(one_row.multiply_one, self.target, self.product, self.one, self.joined)))
        launches += [(FEW.rows * ROWS, self._eight), (BATCH_ROWS, self._batch)]
        by_rows(self.product.out.shape[0], launches, self._most)

    def _finish(self) -> None:
        if self.then is not None:
            self.then.launch(self.product.out)

    def _eight(self) -> None:
        multiply_few(self.product, self.few, None)
        self._finish()

    def _batch(self) -> None:
        if self.staying is not None and self.found is not None:
            batch.multiply_batch(self.target, self.product, self.staying, self.found, self.joined)
            if self.joined is None:
                self._finish()
        else:
            self.image.write(self.some.rows)
            multiply_few(self.product, self.some, self.image)
            self._finish()

    def _most(self) -> None:
        if self.groups is not None:
            self.image.write(self.groups.rows, apart=True)
            warpgroups.multiply_most(self.product, self.image, self.groups)
        else:
            self.image.write(self.many.rows)
            prefill.multiply_many(self.product, self.image, self.many)
        self._finish()


def _matrix(attrs: dict[str, Any]) -> str:
    """The dtype of a packed matrix."""
    return {"f32": "float32"}.get(str(attrs["format"]), "int32")


def packed_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, K), packed (N = width, K) -> (M, N): x in two parts of bfloat16."""
    columns, form = int(shapes[0][1]), Form(str(attrs["format"]))
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments(["float32", _matrix(attrs), "float32"], shapes)
        product = Product(x, weight, out, form, int(attrs["width"]), columns, floats(columns), 2)
        _Linear(target, product).launch()
    return builder.get()


def bf16_linear(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], then: str = "") -> tirx.PrimFunc:
    """bfloat16 pairs x (M, K/2), packed (N = width, K) -> (M, N).

    then: an op of ACTIVATED; what it gives is bfloat16 pairs (M, width / halves / 2).
    """
    count, width, form = int(shapes[0][1]), int(attrs["width"]), Form(str(attrs["format"]))
    with IRBuilder() as builder, T.prim_func():
        x, weight, out = arguments(["int32", _matrix(attrs), "int32" if then else "float32"], shapes)
        results = T.alloc_buffer((x.shape[0], width)) if then else out
        product = Product(x, weight, results, form, width, 2 * count, pairs(count), 1)
        _Linear(target, product, Activated(ACTIVATED[then], attrs, out) if then else None).launch()
    return builder.get()
