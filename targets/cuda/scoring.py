"""How attention scores a token on CUDA: scaled products of query and key, capped, biased by distance.

Scores are times log2(e): weights are powers of 2, which chips have an instruction for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, fma, held

_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Scoring:
    """Scores are scaled, capped if `soft_cap`, less what `slopes` (H,) of alibi take for the distance, either way.

    `biases` is a buffer (H, 2W + 1) of what is added for each distance -W..W, `sinks` one (H,) of the scores of a token
    without a value.
    """

    scale: float
    soft_cap: float = 0.0
    slopes: tuple[float, ...] = ()
    biases: Any = None
    sinks: Any = None

    def slope(self, head: Any) -> Any:
        """That of a head, in a register; None without alibi."""
        if not self.slopes:
            return None
        own = f32(self.slopes[0])
        for other, slope in enumerate(self.slopes[1:], 1):
            own = T.Select(head == other, f32(slope), own)
        return held(own)

    def score(self, product: Any, head: Any, slope: Any, place: Any) -> Any:
        """q.k of a token that is so far after the row -> its score; `slope` is the head's."""
        # A product by itself: nothing that is added to it, or taken off, is rounded together with it.
        unit = _LOG2E if self.biases is None and slope is None else 1.0
        score = fma(product, f32(self.scale if self.soft_cap else self.scale * unit), f32(0))
        if self.soft_cap:
            score = fma(T.tanh(score / f32(self.soft_cap)), f32(self.soft_cap * unit), f32(0))
        if self.biases is not None:
            most = int(self.biases.shape[1]) // 2
            score = held(score) + self.biases[head, T.max(T.min(place, most), -most) + most]
        if slope is not None:
            score = fma(slope, T.cast(T.min(place, -place), "float32"), held(score))
        return held(score if unit != 1 else fma(held(score), f32(_LOG2E), f32(0)))

    def sink(self, head: Any) -> Any:
        """The score of a head's token without a value; None where there is none."""
        return None if self.sinks is None else fma(self.sinks[head], f32(_LOG2E), f32(0))
