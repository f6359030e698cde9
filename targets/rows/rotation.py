"""The rotation of 64 columns (compiler/hadamard.py) in registers, the same bits as in NumPy."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.vector import LANES, f32, fma, held, i32, lanes, splat


def rotated(numbers: list[Any]) -> list[Any]:
    """Four float32x16 in the order of their columns -> the same, rotated."""
    numbers = [held(sixteen) for sixteen in numbers]
    distance = 1
    while distance < LANES:
        numbers = [_pairs(sixteen, distance) for sixteen in numbers]
        distance *= 2
    for apart in (1, 2):
        a, b, c, d = numbers if apart == 1 else (numbers[at] for at in (0, 2, 1, 3))
        numbers = [held(each) for each in (a + b, a - b, c + d, c - d)]
    factor = splat(f32((LANES * len(numbers)) ** -0.5))
    return [held(numbers[at] * factor) for at in (0, 2, 1, 3)]


def _pairs(x: Any, distance: int) -> Any:
    """Lanes a and b that stand so far apart become a + b and a - b: times 1 or -1 nothing is rounded."""
    others = tirx.Shuffle([x], [i32(lane ^ distance) for lane in range(LANES)])
    below = T.bitwise_and(lanes(i32(0)), splat(i32(distance))) == splat(i32(0))
    return held(fma(x, T.Select(below, splat(f32(1)), splat(f32(-1))), others))
