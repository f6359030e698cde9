"""What quantization did to the model: the artifact's next-token distributions beside the original's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.driver.probe import Probe
from llmc.runtime.engine import Feed, Output
from llmc.runtime.model import load
from llmc.runtime.quality import score_rows

LARGE_KL = 0.1  # nats: about where answers start to differ visibly


@dataclass(frozen=True)
class Loss:
    """Mean Kullback-Leibler divergence of a text's tokens, in nats, and how often the likeliest token is the same."""

    kl: float
    top1_agreement: float
    tokens: int

    @property
    def large(self) -> bool:
        """Whether people are likely to notice."""
        return self.kl > LARGE_KL

    def as_dict(self) -> dict[str, float | int]:
        """As the manifest has it."""
        return asdict(self)


def measure(probe: Probe, artifact: Path, windows: list[list[int]]) -> Loss:
    """Run the finished artifact and the original on the same windows."""
    kl, same = [], []
    with load(artifact) as model:
        for ids in windows:
            sequence = model.engine.new_sequence()
            got = model.engine.step([Feed(sequence, ids, "all")]).logits
            model.engine.release(sequence)
            divergence, agreement = compare(probe.run(ids)[0], got)
            kl.append(divergence)
            same.append(agreement)
    every = np.concatenate(kl)
    return Loss(float(every.mean()), float(np.concatenate(same).mean()), len(every))


def compare(expected: NDArray[np.float32], got: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Logits (n, V) of both -> KL(expected || got) and equality of the likeliest token, (n,)."""
    outputs = [Output(logits, logits.argmax(-1).astype(np.int32)) for logits in (got, expected)]
    _, kl = score_rows(outputs, outputs[1].argmax)
    return kl, outputs[0].argmax == outputs[1].argmax
