"""The greatest numbers of a row, to the last bit, and what a row that is no numbers gives."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler import meaning

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import Case, result
from test_kernels import VARIANTS, WIDTHS


def _top(x: np.ndarray, variant: str) -> list[np.ndarray]:
    return result(Case("top", [x], {}, (0,)), VARIANTS[variant], meaning.top(x))


@pytest.mark.parametrize("variant", WIDTHS)
def test_the_greatest_are_exact_and_ties_in_order(variant: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 20_003)).astype(np.float32)
    x[1] = x[1].round(1)  # hundreds of each number
    x[2] = np.sort(x[2])  # the last are the greatest
    x[3] = 0.5  # all equal
    x[4, ::2] = -np.inf
    x[5] = -np.inf
    x[5, [17, 19_999]] = 1, 2
    x[6, 20_000:] = 9  # after the last sixteen
    x[7] = -1e38
    ids, values, normalizers = _top(x, variant)
    wanted = meaning.top(x)
    np.testing.assert_array_equal(ids, wanted[0])
    np.testing.assert_array_equal(values, wanted[1])
    np.testing.assert_allclose(normalizers, np.log(np.exp(x - x.max(1)[:, None]).sum(1, dtype=np.float64)) + x.max(1))


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 37, 639, 641])
def test_what_is_no_number_shows_in_the_normalizer(wrong: float, place: int, variant: str) -> None:
    x = np.random.default_rng(place).standard_normal((2, 642)).astype(np.float32)
    x[0, place] = wrong
    normalizers = _top(x, variant)[2]
    assert np.isfinite(normalizers).tolist() == [False, True]
