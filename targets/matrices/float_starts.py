"""Where dots of each row begin that are read as float32 (float_dots.py), for formats with a whole-number offset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BlockFormat
from llmc.targets.matrices.block_dots import start_from
from llmc.targets.matrices.block_sums import first_total, step_of
from llmc.targets.matrices.codes import Tile
from llmc.targets.matrices.float_dots import BITS
from llmc.targets.target import Target
from llmc.targets.vector import i32


def added_starts(
    target: Target, format: BlockFormat, columns: int
) -> Callable[[list[Any], Any, Any], list[Any]] | None:  # fmt: skip
    """What `Many.added` is for dots that begin so, int32 (rows, steps); None where all begin with BITS alone."""
    return partial(_starts, target, format, columns) if format.whole else None


def _starts(target: Target, format: BlockFormat, columns: int, left: list[Any], start: Any, count: Any) -> list[Any]:
    zero = Tile(target, format, None, columns, 0, quick=False).start_zero
    steps, first = columns // step_of(format), first_total(format, columns)
    starts = T.alloc_buffer((target.knobs.row_block, steps), "int32")
    with T.serial(0, count) as row, T.serial(0, steps) as step:
        begun = start_from(zero, left[2][start + row, first + step], i32)
        T.buffer_store(starts, begun + i32(BITS), [row, step])
    return [starts]
