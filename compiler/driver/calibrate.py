"""Activation statistics: what each matrix is multiplied with when the model reads a text, on its own kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.compiler.driver.probe import F32, Probe, squares_of_inputs
from llmc.compiler.driver.sources import Gram


def calibrate(probe: Probe, windows: list[list[int]], progress: Callable[[int, int], None]) -> dict[str, Gram]:
    """First weight of a matrix -> mean of x x^T over all tokens, (K, K) float32.

    Every weight of a fused matrix has its entry, so that a recipe may also take the parts apart. First tokens count
    like all others: models park attention on them with huge activations, and lose their footing without those.
    """
    read = [matrix for matrix in probe.matrices if matrix.input is not None]
    sums: list[Gram] = [np.zeros((matrix.columns, matrix.columns), np.float32) for matrix in read]
    tokens = 0
    for number, ids in enumerate(windows):
        progress(number, len(windows))
        _, inputs = probe.run(ids)
        for total, x in zip(sums, inputs, strict=True):
            total += x.T @ x
        tokens += len(ids)
    progress(len(windows), len(windows))
    grams: dict[str, Gram] = {}
    for matrix, total in zip(read, sums, strict=True):
        total /= tokens
        grams |= dict.fromkeys(matrix.sources, total)
    return grams


def mean_squares(probe: Probe, texts: list[list[int]]) -> list[dict[str, F32]]:
    """The diagonals alone, of each text by itself."""
    read = [matrix.sources for matrix in probe.matrices if matrix.input is not None]
    return [squares_of_inputs(read, probe.run(ids)[1]) for ids in texts]


def squares_of(grams: dict[str, Gram]) -> dict[str, F32]:
    """The mean squares (K,) among them."""
    return {name: np.ascontiguousarray(gram.diagonal()) for name, gram in grams.items()}
