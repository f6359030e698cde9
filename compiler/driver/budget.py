"""Mixed precision to a budget: the formats that lose least, by measurement, within so many bits.

How much a matrix matters is measured: the divergence of the model's predictions when that matrix alone is rounded to
`TRIAL`. How much better or worse a format would be for it follows from its error on a sample of the matrix's rows: the
divergence of a small error grows with its square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.driver.check import compare
from llmc.compiler.driver.probe import Probe
from llmc.compiler.driver.recipe import ROUTER, Recipe
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, block_format, dequantize
from llmc.compiler.spec import weight_count
from llmc.compiler.spec.tensors import is_router
from llmc.passes.matrices import Matrix
from llmc.passes.quantize.allocate import Choice, allocate

CANDIDATES = ("c2", "c2h", "c3", "c3h", "c4", "c5", "c6", "q8")
TRIAL = "c3"
SAMPLE_ROWS = 256  # of a matrix, for the errors of formats


@dataclass(frozen=True)
class Budget:
    """The most bytes of weights, and how the user said it."""

    bytes: float
    said: str


def weigh_formats(
    probe: Probe, source: ModelSources, windows: list[list[int]], progress: Callable[[int, int], None]
) -> list[list[Choice]]:
    """For every matrix of the probe, what each format costs and loses: the model's divergence on the windows."""
    trial = _Trial(probe, source, windows, [probe.run(ids)[0] for ids in windows])
    choices = []
    for number, matrix in enumerate(probe.matrices):
        progress(number, len(probe.matrices))
        if is_router(matrix.sources[0]):
            choices.append([Choice(ROUTER, 4 * matrix.rows * matrix.columns, 0.0)])
        else:
            choices.append(_choices(source, matrix, trial.loss(matrix)))
    progress(len(probe.matrices), len(probe.matrices))
    return choices


def choose_formats(probe: Probe, model: Any, choices: list[list[Choice]], budget: Budget) -> Recipe:
    """The recipe within the budget that loses least. Raises LlmcError when none is small enough."""
    fixed = sum(4 * math.prod(t.shape) for t in model.tensors.values() if len(t.shape) == 1)
    picked = allocate(choices, budget.bytes - fixed)
    if picked is None:
        least = fixed + sum(min(choice.bytes for choice in each) for each in choices)
        weights = weight_count(model.spec)
        raise LlmcError(
            f"{budget.said} cannot be met: the smallest recipe is {least / 1e6:.1f} MB, {8 * least / weights:.2f} bits "
            "per weight; ask for at least that"
        )
    pairs = zip(probe.matrices, picked, strict=True)
    return {name: choice.name for matrix, choice in pairs for name in matrix.sources}


@dataclass(frozen=True)
class _Trial:
    """Measures matrices one at a time."""

    probe: Probe
    source: ModelSources
    windows: list[list[int]]
    expected: list[NDArray[np.float32]]  # logits of the windows

    def loss(self, matrix: Matrix) -> float:
        """Mean divergence with this matrix alone in the trial format."""
        format = block_format(TRIAL)
        rounded = dequantize(format, format.quantize(self.source.stacked(matrix.sources)))[:, : matrix.columns]
        with self.probe.replaced(matrix, self.source.unscaled(matrix.sources, rounded)):
            lost = [
                compare(e, self.probe.run(ids)[0], self.probe.hidden)[0]
                for e, ids in zip(self.expected, self.windows, strict=True)
            ]
        return float(np.concatenate(lost).mean())


def _choices(source: ModelSources, matrix: Matrix, trial_loss: float) -> list[Choice]:
    """What each candidate would cost and lose for one matrix."""
    weight = source.stacked(matrix.sources)
    rows = weight[:: max(1, len(weight) // SAMPLE_ROWS)]
    importance = source.importance(matrix.sources[0])

    def error(name: str) -> float:
        format = block_format(name)
        difference = dequantize(format, format.quantize(rows, importance))[:, : matrix.columns] - rows
        return float((difference**2 * (1 if importance is None else importance)).sum())

    whole = error(TRIAL) or 1.0
    choices = [Choice(name, _bytes(name, matrix), trial_loss * error(name) / whole) for name in CANDIDATES]
    kept = {source.model.tensors[name].kept for name in matrix.sources}
    if len(kept) == 1 and None not in kept:
        name = kept.pop()
        choices = [choice for choice in choices if choice.name != name]
        choices.append(Choice(name, _bytes(name, matrix), 0.0))
    return choices


def _bytes(format: str, matrix: Matrix) -> int:
    return 4 * math.prod(FORMATS[format].packed_shape(matrix.rows, matrix.columns))
