"""What quantization did to the model: the artifact's outputs beside the original's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.driver.probe import Probe
from llmc.runtime.load_model import load
from llmc.runtime.model import Model
from llmc.runtime.quality import score_rows
from llmc.runtime.runner import Feed, Output, Runner

F32 = NDArray[np.float32]
ANSWER_TOKENS = 24  # to each source, at most
ROWS = 64  # of a text that are compared at a time: a large vocabulary's logits take much memory
LARGE_KL = 0.1  # nats: about where answers start to differ visibly
LARGE_ANGLE = 0.01  # one less the cosine: about where the order of a search's results starts to differ


@dataclass(frozen=True)
class Loss:
    """Means over a text's tokens.

    Of a model with logits: Kullback-Leibler divergence in nats, and how often the likeliest token is the same. Of one
    with vectors: the cosine between the original's and ours.
    """

    tokens: int
    kl: float | None = None
    top1_agreement: float | None = None
    cosine: float | None = None

    @property
    def large(self) -> bool:
        """Whether people are likely to notice."""
        return (self.kl or 0) > LARGE_KL or (self.cosine is not None and 1 - self.cosine > LARGE_ANGLE)

    def as_dict(self) -> dict[str, float | int]:
        """As the manifest has it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Texts:
    """What the original makes of texts, (n, V) logits of each, or, where it is `hidden`, vectors.

    `whole`: what it makes of a token may depend on those behind it.
    """

    windows: list[list[int]]
    expected: list[F32]
    hidden: bool = False
    whole: bool = False

    def measure(self, artifact: Path) -> Loss:
        """Run the finished artifact on the same windows."""
        with load(artifact) as model:
            return _mean(self._pairs(model.runner), self.hidden)

    def _pairs(self, runner: Runner) -> Iterator[tuple[F32, F32]]:
        """The original's outputs of some rows and ours."""
        for ids, expected in zip(self.windows, self.expected, strict=True):
            sequence, step = runner.new_sequence(), len(ids) if self.whole else ROWS
            for first in range(0, len(ids), step):
                rows = slice(first, first + step)
                yield expected[rows], runner.step([Feed(sequence, ids[rows], "all")]).logits
            runner.release(sequence)


@dataclass(frozen=True)
class Answers:
    """An original with an encoder, sources, and what an answer to them begins with."""

    probe: Probe
    sources: list[list[int]]
    lead: list[int]

    def measure(self, artifact: Path) -> Loss:
        """Run the finished artifact, and both models on what it answers."""
        with load(artifact) as model:
            return _mean(_answers(self.probe, model, self.sources, self.lead), self.probe.hidden)


def _mean(pairs: Iterable[tuple[F32, F32]], hidden: bool) -> Loss:
    """Of the original's outputs and ours."""
    found = [compare(expected, got, hidden) for expected, got in pairs]
    every = np.concatenate([divergence for divergence, _ in found])
    if hidden:
        return Loss(len(every), cosine=1 - float(every.mean()))
    return Loss(len(every), float(every.mean()), float(np.concatenate([same for _, same in found]).mean()))


def _answers(probe: Probe, model: Model, sources: list[list[int]], lead: list[int]) -> Iterator[tuple[F32, F32]]:
    """The same of the artifact's greedy answers to sources, up to their ends: what would follow no one reads."""
    runner, ends = model.runner, model.manifest["tokens"]["eos"]
    reads = [runner.new_sequence() for _ in sources]
    for read, source in zip(reads, sources, strict=True):
        runner.encode([(read, source)])
    answers = [runner.new_sequence(read) for read in reads]
    ids = [list(lead) for _ in sources]
    going = list(range(len(sources)))
    while going:
        likeliest = runner.step([(answers[n], ids[n][answers[n].length :]) for n in going]).argmax.tolist()
        for number, token in zip(going, likeliest, strict=True):
            ids[number].append(token)
        going = [n for n in going if ids[n][-1] not in ends and len(ids[n]) <= min(ANSWER_TOKENS, runner.context)]
    for number, source in enumerate(sources):
        runner.release(answers[number])
        said = ids[number][:-1]
        got = runner.step([Feed(answers[number], said, "all")]).logits
        yield probe.run(said, source)[0], got


def compare(
    expected: NDArray[np.float32], got: NDArray[np.float32], hidden: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Logits (n, V) of both -> KL(expected || got) and equality of the likeliest token, (n,).

    `hidden`: of vectors (n, C), in place of KL, one less the cosine between them.
    """
    if hidden:
        a, b = expected.astype(np.float64), got.astype(np.float64)
        cosine = (a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30)
        return 1 - cosine, np.ones(len(a), np.bool_)
    outputs = [Output.with_best(logits, logits.argmax(-1).astype(np.int32)) for logits in (got, expected)]
    _, kl = score_rows(outputs, outputs[1].argmax)
    return kl, outputs[0].argmax == outputs[1].argmax
