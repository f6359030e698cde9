"""Which frequencies rope turns with in a layer, by the spec's base, factor and scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.spec import ModelSpec
from llmc.compiler.spec.blocks import Scaling

F32 = NDArray[np.float32]
Frequencies = NDArray[Any]


@dataclass(frozen=True)
class Rope:
    """Rope of one kind of layers: base, linear factor, and the spec's scaling where it applies."""

    theta: float
    factor: float
    scaling: Scaling | None
    backwards: bool = False

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied with."""
        return self.scaling.magnitude if self.scaling else 1.0

    def frequencies(self, size: int, context: int) -> F32:
        """(R/2,) radians a position of the R = `size` rotated numbers, for texts up to `context` tokens."""
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        turns = (np.float32(1) / np.float32(self.theta) ** exponents / np.float32(self.factor)).astype(np.float32)
        if self.scaling is not None:
            turns = _SCALE[self.scaling.kind](turns, self.scaling, self.theta, context).astype(np.float32)
        return -turns if self.backwards else turns


def rope_of(spec: ModelSpec, layer: int) -> Rope | None:
    """Rope of a layer; None where positions are not told by rope."""
    if spec.position.kind != "rope" or layer in spec.position.plain_layers:
        return None
    window = spec.window
    if window and layer in window.layers:
        return Rope(window.theta, window.factor, spec.scaling if window.scaled else None, spec.position.backwards)
    return Rope(spec.position.theta, spec.position.factor, spec.scaling, spec.position.backwards)


def _llama3(frequencies: F32, scaling: Scaling, theta: float, context: int) -> Frequencies:
    turns = frequencies * scaling.original_context / (2 * math.pi)  # in the original context
    keep = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(frequencies: F32, scaling: Scaling, theta: float, context: int) -> Frequencies:
    size = 2 * len(frequencies)

    def pair(turns: float) -> float:
        """Number of the pair that makes so many turns in the original context (arXiv 2309.00071 section 3.2)."""
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.high), pair(scaling.low)
    if scaling.round_ends:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = np.clip((np.arange(len(frequencies)) - first) / max(last - first, 1e-3), 0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _longrope(frequencies: F32, scaling: Scaling, theta: float, context: int) -> Frequencies:
    factors = scaling.long if context > scaling.original_context else scaling.short
    return frequencies / np.array(factors, np.float32)


def _dynamic(frequencies: F32, scaling: Scaling, theta: float, context: int) -> Frequencies:
    """Those of a base that is greater by what `factor` asks for at this length (transformers' dynamic NTK)."""
    pairs = len(frequencies)
    longer = max(context, scaling.original_context) / scaling.original_context
    growth = scaling.factor * longer - (scaling.factor - 1)
    return frequencies / growth ** (np.arange(pairs) / max(pairs - 1, 1))


def _proportional(frequencies: F32, scaling: Scaling, theta: float, context: int) -> Frequencies:
    turning = int(scaling.part * 2 * len(frequencies)) // 2
    return np.where(np.arange(len(frequencies)) < turning, frequencies / scaling.factor, 0)


_SCALE = {
    "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "dynamic": _dynamic, "proportional": _proportional,
}  # fmt: skip
