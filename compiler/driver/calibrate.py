"""Activation statistics: what each matrix is multiplied with when the model reads a text, on its own kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.driver.probe import Probe
from llmc.compiler.driver.sources import Gram

Squares = NDArray[np.float32]


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


def mean_squares(probe: Probe, texts: list[list[int]]) -> list[dict[str, Squares]]:
    """The diagonals alone, of each text by itself."""
    read = [matrix for matrix in probe.matrices if matrix.input is not None]
    found: list[dict[str, Squares]] = []
    for ids in texts:
        _, inputs = probe.run(ids)
        found.append({})
        for matrix, x in zip(read, inputs, strict=True):
            found[-1] |= dict.fromkeys(matrix.sources, np.square(x).mean(0))
    return found


def squares_of(grams: dict[str, Gram]) -> dict[str, Squares]:
    """The mean squares (K,) among them."""
    return {name: np.ascontiguousarray(gram.diagonal()) for name, gram in grams.items()}
