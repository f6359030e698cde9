"""The compiled trials of scales, against what they mean in NumPy: the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.formats import block_format
from llmc.compiler.formats.codebooks import CODEBOOKS
from llmc.compiler.formats.search import Nearest, nearest_of
from llmc.compiler.formats.trials import Trials

F32 = np.ndarray


def sums(nearest: Nearest, x: F32, h: F32 | None, inverse: F32) -> tuple[F32, F32]:
    """Row after row, so that the order of a sum is said."""
    c = nearest.values[nearest.near(x * inverse)].transpose(2, 0, 1).reshape(x.shape)
    inner, square = (np.zeros(x.shape[1], np.float32) for _ in range(2))
    for row in range(len(x)):
        weight, entry = (x[row], c[row] * c[row]) if h is None else (x[row] * h[row], c[row] * c[row] * h[row])
        inner, square = inner + weight * c[row], square + entry
    return inner, square


def best(nearest: Nearest, x: F32, h: F32 | None, inverses: F32) -> F32:
    scale, most = (np.zeros(x.shape[1], np.float32) for _ in range(2))
    for reach in (*nearest.trials, None):
        with np.errstate(divide="ignore"):
            inverse = np.where(scale == 0, np.float32(0), 1 / scale) if reach is None else inverses * reach
        inner, square = sums(nearest, x, h, inverse)
        fitted = inner / np.maximum(square, np.float32(1e-30))
        better = inner * fitted > most * np.float32(1 + 1e-6)
        scale, most = np.where(better, fitted, scale), np.where(better, inner * fitted, most)
    return scale


def blocks(n: int, seed: int, weighted: bool, size: int = 32) -> tuple[F32, F32 | None, F32]:
    """Blocks with heavy tails, some of zeros and some with a single weight; what scales them to the codebook's size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (size, n)).astype(np.float32)
    x[1:, rng.random(n) < 0.1] = 0
    x[:, rng.random(n) < 0.1] = 0
    h = rng.lognormal(0, 1, (size, n)).astype(np.float32) if weighted else None
    top = np.abs(x).max(0)
    return x, h, np.where(top > 0, np.float32(64) / np.maximum(top, np.float32(1e-9)), np.float32(0))


@pytest.mark.parametrize("name", CODEBOOKS)
@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 70), seed=st.integers(0, 1000), weighted=st.booleans())
def test_they_give_the_bits_of_their_meaning(name: str, n: int, seed: int, weighted: bool) -> None:
    format = block_format(name)
    nearest, (x, h, inverses) = nearest_of(format), blocks(n, seed, weighted, format.block)
    trials = Trials(nearest.table, nearest.steps, x, h)
    for found, wanted in zip(trials.sums(inverses), sums(nearest, x, h, inverses), strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(trials.best(inverses, nearest.trials), best(nearest, x, h, inverses))


def test_a_finer_table_and_importance_of_columns() -> None:
    """What is designed with, and an importance that all blocks share."""
    nearest, (x, _, inverses) = Nearest(np.array([-60, -7.25, 0, 12.5, 64]), 16), blocks(19, 1, False)
    h = np.random.default_rng(0).uniform(0.1, 2, (32, 1)).astype(np.float32)
    trials = Trials(nearest.table, nearest.steps, x, h)
    wanted = best(nearest, x, np.repeat(h, 19, axis=1), inverses)
    np.testing.assert_array_equal(trials.best(inverses, nearest.trials), wanted)
    assert np.count_nonzero(wanted) > 10


def test_threads_do_not_disturb_each_other() -> None:
    format = block_format("c3")
    nearest = nearest_of(format)

    def run(seed: int) -> F32:
        x, h, inverses = blocks(200, seed, True)
        return Trials(nearest.table, nearest.steps, x, h).best(inverses, nearest.trials)

    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(run, range(24)), map(run, range(24)), strict=True):
            np.testing.assert_array_equal(found, wanted)
