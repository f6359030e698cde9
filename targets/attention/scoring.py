"""How attention scores a token: scaled products of query and key, capped, biased by distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.rows.elementwise import capped
from llmc.targets.vector import LANES, f32, fma, i32, lanes, registers, splat


@dataclass(frozen=True)
class Scoring:
    """Scores are scaled, capped if `soft_cap`, less what `slopes` (H,) of alibi take.

    Where not `causal`, slopes count the distance to later tokens too. `biases` is a buffer (H, 2W + 1) of what is added
    for each distance -W..W, `sinks` one (H,) of the scores of a token without a value.
    """

    scale: float
    causal: bool = True
    soft_cap: float = 0.0
    slopes: tuple[float, ...] = ()
    biases: Any = None
    sinks: Any = None

    def table(self) -> Any:
        """The slopes where a head's number, not known yet, finds its own; None without alibi."""
        if not self.slopes:
            return None
        padded = [f32(slope) for slope in self.slopes] + [f32(0)] * (-len(self.slopes) % LANES)
        table = registers((len(padded),), "float32")
        for start in range(0, len(padded), LANES):
            sixteen = tirx.Shuffle(padded[start : start + LANES], [i32(lane) for lane in range(LANES)])
            T.buffer_store(table, sixteen, [lanes(start)])
        return table

    def score(self, products: Any, head: Any, slopes: Any, place: Any) -> Any:
        """q.k of sixteen tokens -> their scores; `place` is the first one's relative to the row."""
        scores = products * splat(f32(self.scale))
        if self.soft_cap:
            scores = capped(scores, self.soft_cap)
        if self.biases is not None:
            scores = fma(scores, splat(f32(1)), self._bias(head, place))
        if slopes is None:
            return scores
        places = T.ramp(place, 1, LANES)
        places = places if self.causal else T.min(places, splat(i32(0)) - places)
        return fma(splat(slopes[head]), T.cast(places, "float32x16"), scores)

    def _bias(self, head: Any, place: Any) -> Any:
        """What is added to the scores of sixteen tokens from `place` on."""
        most = int(self.biases.shape[1]) // 2
        found = registers((LANES,), "float32")
        with T.serial(0, LANES) as lane:
            T.buffer_store(found, self.biases[head, T.max(T.min(place + lane, most), -most) + most], [lane])
        return found[lanes(0)]
