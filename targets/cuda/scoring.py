"""How attention scores a token on CUDA: scaled products of query and key, capped, biased by distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, fma, held


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
        score = fma(product, f32(self.scale), f32(0))
        if self.soft_cap:
            score = fma(T.tanh(score / f32(self.soft_cap)), f32(self.soft_cap), f32(0))
        if self.biases is not None:
            most = int(self.biases.shape[1]) // 2
            score = held(score) + self.biases[head, T.max(T.min(place, most), -most) + most]
        if slope is None:
            return held(score)
        return held(fma(slope, T.cast(T.min(place, -place), "float32"), held(score)))
