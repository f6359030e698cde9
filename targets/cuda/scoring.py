"""How attention scores a token on CUDA: scaled products of query and key, capped, biased by distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.elementwise import capped
from llmc.targets.cuda.launch import f32, fma, held, local


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

    def own_slopes(self, share: Any, heads: int) -> Any:
        """The slopes of the `heads` heads of a share of all heads, in registers; None without alibi."""
        if not self.slopes:
            return None
        own = local((heads,))
        for head in range(heads):
            T.buffer_store(own, f32(self.slopes[head]), [head])
            for other in range(1, len(self.slopes) // heads):
                slope = f32(self.slopes[other * heads + head])
                T.buffer_store(own, T.Select(share == other, slope, own[head]), [head])
        return own

    def score(self, product: Any, head: Any, slope: Any, place: Any) -> Any:
        """q.k of a token that is so far after the row -> its score; `slope` is the head's."""
        score = product * f32(self.scale)
        if self.soft_cap:
            score = capped(score, self.soft_cap)
        if self.biases is not None:
            most = int(self.biases.shape[1]) // 2
            score = held(score) + self.biases[head, T.max(T.min(place, most), -most) + most]
        if slope is None:
            return score
        # One product is rounded with the sum, always the same one.
        return fma(slope, T.cast(T.min(place, -place), "float32"), held(score))
