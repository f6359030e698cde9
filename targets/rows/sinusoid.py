"""Sines and cosines of positions, as they are added to an embedding."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.rows.rows import kernel
from llmc.targets.target import Target
from llmc.targets.vector import i32


def sinusoid(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """positions (M,), frequencies (F,) -> sines, then cosines (M, 2F) of positions + offset."""
    count, offset = int(shapes[1][0]), int(attrs["offset"])

    def body(buffers: list[Any], row: Any) -> None:
        positions, frequencies, out = buffers
        with T.serial(0, count) as i:
            angle = T.cast(positions[row] + i32(offset), "float32") * frequencies[i]
            T.buffer_store(out, T.sin(angle), [row, i])
            T.buffer_store(out, T.cos(angle), [row, count + i])

    return kernel(["int32", "float32", "float32"], shapes, body)
