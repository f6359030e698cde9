"""What multiplies a packed matrix with a left side of each form, float32, bfloat16 pairs or int8 blocks.

Ops whose left side is only some columns of a wider one read it through `Columns`, and reduce as linear layers do.
"""

from __future__ import annotations

from typing import Any

from llmc.compiler.formats import FORMATS, SUM_BLOCK, BlockFormat, block_format
from llmc.targets.matrices.bf16_linear import bf16_product
from llmc.targets.matrices.block_linear import i8_product, packed_product
from llmc.targets.matrices.linear import Product, f32_product
from llmc.targets.target import Target

# Form -> columns of the matrix that a column of the first operand stands for.
PER_WORD = {"packed": 1, "bf16": 2, "i8": 4}


def product_of(kind: str, target: Target, format: str, columns: int) -> Product:
    """The product of linear layers that have a left side of this form, over so many columns."""
    packing = FORMATS[format]
    if kind == "bf16":
        return bf16_product(target, -(-columns // 2))
    if not isinstance(packing, BlockFormat):
        return f32_product(target, columns)
    if kind == "packed":
        return packed_product(target, packing, columns)
    return i8_product(target, packing, columns)


class Columns:
    """A buffer (rows, columns) from column `first` on."""

    def __init__(self, buffer: Any, first: Any) -> None:
        self.buffer, self.first = buffer, first

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        row, column = index
        return self.buffer[row, self.first + column]


def sliced(left: list[Any], kind: str, format: str, at: Any, step: int, count: int, columns: int) -> list[Any]:
    """The left operands of slice `at` of `count` slices of `step` columns each, of which the first `columns` matter.

    Totals of codes are those of blocks of 32 columns and, after these for all slices, of 16.
    """
    words = Columns(left[0], at * (step // PER_WORD[kind]))
    if kind != "i8":
        return [words]
    packing = block_format(format)
    blocks = step // packing.left_block
    if packing.block == SUM_BLOCK:  # asked for behind the totals of 32 that a slice by itself would have
        totals = Columns(left[2], at * (step // SUM_BLOCK) + (count * blocks - columns // packing.left_block))
    else:
        totals = Columns(left[2], at * blocks)
    return [words, Columns(left[1], at * blocks), totals]
