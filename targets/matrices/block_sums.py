"""What is done with the integer dots of a block, the same in every kernel that multiplies block formats with int8."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, SUM_BLOCK, BlockFormat
from llmc.targets.matrices.float_dots import scaled
from llmc.targets.vector import fma, splat


def step_of(format: BlockFormat) -> int:
    """Columns whose dots may be summed as integers: they share a scale of the weights and one of the activations."""
    return min(format.block, format.left_block)


def first_total(format: BlockFormat, columns: int) -> int:
    """The column of a row's totals that the first step's is in: those of 16 columns come after those of 32."""
    return columns // BLOCK if step_of(format) == SUM_BLOCK else 0


def add_sums(
    total: Any, dots: list[Any], scales: list[Any], scale: Any, offset: Any = None, totals: list[Any] | None = None,
    less: Any = None,
) -> Any:  # fmt: skip
    """total (16,) plus a block's share of a row: (scale * d) * s of each step, and offset * (sum of t), in this order.

    d are the dots of each step, (16,) int32, s and t the activations' scale and total there. With `less` dots are as
    float_dots.py has them.
    """
    for dot, left_scale in zip(dots, scales, strict=True):
        product = T.cast(dot, "float32x16") * scale if less is None else scaled(dot, scale, less)
        total = fma(product, splat(left_scale), total)
    if offset is None:
        return total
    assert totals is not None
    first, *others = (splat(t) for t in totals)
    return fma(offset, sum(others, first), total)
