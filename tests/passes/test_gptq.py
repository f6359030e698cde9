"""Error compensation: less loss than rounding alone, the same as the textbook's algorithm, and no input breaks it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import BlockFormat, Quantized, block_format, dequantize
from llmc.passes.quantize.gptq import _planned, _Rows, compensate

OURS = ["c2", "c2h", "c3", "c3h", "c4", "c5", "c6"]
ROTATED = ["r3h", "r4", "r5", "r6"]
SEEDS = ["q2", "q3h", "q4", "q4_b64", "q8"]


def problem(rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and second moments of inputs that are correlated and of unequal size."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((columns, columns)) * 0.97 ** np.arange(columns)[:, None]
    inputs = rng.standard_normal((4 * columns, columns)) @ mixing * rng.lognormal(0, 0.7, columns)
    return rng.standard_normal((rows, columns)).astype(np.float32), inputs.T @ inputs / len(inputs)


def loss(format: BlockFormat, quantized: Quantized, weight: np.ndarray, hessian: np.ndarray) -> float:
    error = dequantize(format, quantized)[:, : weight.shape[1]].astype(np.float64) - weight
    return float(np.einsum("ij,jk,ik", error, hessian, error, optimize=True))


@pytest.mark.parametrize("name", OURS + ROTATED + SEEDS)
@settings(max_examples=3, deadline=None)
@given(rows=st.integers(4, 40), columns=st.sampled_from([64, 100, 192]), seed=st.integers(0, 1000))
def test_loss_is_well_below_rounding_alone(name: str, rows: int, columns: int, seed: int) -> None:
    format, (weight, hessian) = block_format(name), problem(rows, columns, seed)
    for plain in (None, np.diag(hessian).astype(np.float32)):
        alone = loss(format, format.quantize(weight, plain), weight, hessian)
        assert loss(format, compensate(weight, format, hessian), weight, hessian) < 0.6 * alone


@pytest.mark.parametrize("name", OURS + ROTATED + SEEDS)
def test_uncorrelated_inputs_leave_nothing_to_compensate(name: str) -> None:
    format, (weight, _) = block_format(name), problem(64, 256, 0)
    eye = np.eye(256, dtype=np.float32)
    alone = loss(format, format.quantize(weight), weight, eye)
    assert loss(format, compensate(weight, format, eye), weight, eye) < 1.03 * alone
    never_active = compensate(weight, format, np.zeros((256, 256)))
    np.testing.assert_array_equal(never_active.codes, compensate(weight, format, eye).codes)


@pytest.mark.parametrize("name", ["c2", "c3h", "c4"])
def test_uncorrelated_inputs_of_unequal_size_are_importance(name: str) -> None:
    format, (weight, _) = block_format(name), problem(64, 256, 8)
    sizes = np.random.default_rng(8).lognormal(0, 1.5, 256).astype(np.float32)
    alone = loss(format, format.quantize(weight, sizes), weight, np.diag(sizes))
    assert loss(format, compensate(weight, format, np.diag(sizes)), weight, np.diag(sizes)) < 1.02 * alone


def test_a_changed_scale_keeps_the_books() -> None:
    format, (weight, hessian) = block_format("c3"), problem(24, 128, 9)
    plan = _planned(format, hessian, 128, 0.01)
    work = _Rows(plan, weight)
    for block in range(len(plan.order)):
        work.quantize(block)
    own = slice(32, 64)
    near = (plan.hessian @ (work.x - work.decoded))[own]
    before, decoded = work.sub[1].copy(), work.decoded[own].copy()
    work._rescale(1, decoded, near, plan.hessian[own, own])
    assert (work.sub[1] != before).any()
    work.decoded[own] = decoded
    np.testing.assert_allclose(near, (plan.hessian @ (work.x - work.decoded))[own], atol=1e-4 * np.abs(near).max())
    entries = plan.entries.values[work.codes[1]].transpose(0, 2, 1).reshape(32, -1)  # (c, n, w) -> a column a row
    np.testing.assert_allclose(decoded, work.scale[1] * entries, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["c2", "c3h", "c4", "r3h", "r4", "q3h", "q4"])
def test_descent_never_adds_loss(name: str) -> None:
    format, (weight, hessian) = block_format(name), problem(24, 192, 1)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(192)
    losses = [loss(format, compensate(weight, format, hessian, rounds=n), weight, damped) for n in range(4)]
    assert losses[1] < 0.99 * losses[0]
    assert losses[2] < losses[1] * (1 + 1e-5)
    assert losses[3] < losses[2] * (1 + 1e-5)


def textbook(format: BlockFormat, weight: np.ndarray, hessian: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """GPTQ as published, a pair of columns at a time, scales (N, blocks) given: codes (N, K / width)."""
    values = format.values.astype(np.float64).reshape(len(format.values), -1) - 64
    width = values.shape[1]
    rows, columns = weight.shape
    order = np.arange(columns).reshape(-1, width, 4).transpose(0, 2, 1).ravel()
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(columns)
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    work, codes = weight[:, order].astype(np.float64), np.empty((rows, columns // width), np.uint8)
    for i in range(columns // width):
        own, later = slice(i * width, (i + 1) * width), slice((i + 1) * width, None)
        entries = scale[:, i * width // 32, None, None] * values
        seen = (work[:, None, own] - entries) @ np.linalg.inv(upper[own, own])
        codes[:, i] = (seen**2).sum(2).argmin(1)
        best = np.take_along_axis(seen, codes[:, i, None, None].astype(np.intp), axis=1)[:, 0]
        work[:, later] -= best @ upper[own, later]
    return codes


@pytest.mark.parametrize("name", OURS)
def test_without_descent_it_is_the_published_algorithm(name: str) -> None:
    format, (weight, hessian) = block_format(name), problem(32, 128, 2)
    # Falling importance: the order in which columns are processed is theirs.
    size = np.sqrt(np.sort(np.diag(hessian))[::-1] / np.diag(hessian))
    hessian = hessian * size * size[:, None]
    if format.pair:  # falling by pairs 8g + p, 8g + 4 + p
        order = np.argsort(np.arange(128).reshape(-1, 2, 4).transpose(0, 2, 1).ravel())
        hessian = hessian[np.ix_(order, order)]
    ours = compensate(weight, format, hessian, rounds=0)
    sub = ours.tables["sub_scale"].astype(np.float64)
    scale = ours.tables["row_scale"][:, None] * sub * np.abs(sub)
    same = ours.codes == textbook(format, weight, hessian, scale)
    # One rounding that falls the other way changes what follows in its row.
    assert same.mean() > 0.97
    assert same.all(1).mean() > 0.9


@pytest.mark.parametrize("name", ["c2", "c3h", "c5", "r3h", "r4", "q3h", "q4"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 65), (3, 40), (1030, 8)])
def test_odd_shapes_and_tails(name: str, rows: int, columns: int) -> None:
    format, (weight, hessian) = block_format(name), problem(rows, columns, 3)
    ours, alone = compensate(weight, format, hessian), format.quantize(weight)
    assert {k: (t.shape, t.dtype) for k, t in ours.tables.items()} == {
        k: (t.shape, t.dtype) for k, t in alone.tables.items()
    }
    assert (ours.codes.shape, ours.codes.dtype) == (alone.codes.shape, alone.codes.dtype)
    assert ours.codes.max() <= format.top
    assert loss(format, ours, weight, hessian) <= 1.05 * loss(format, alone, weight, hessian) + 1e-3 * hessian.max()


@pytest.mark.parametrize("name", ["c2", "c4", "r4", "q4"])
def test_columns_that_were_never_active(name: str) -> None:
    format, (weight, hessian) = block_format(name), problem(32, 128, 4)
    dead = np.arange(128) % 16 == 5
    hessian[dead] = hessian[:, dead] = 0
    values = dequantize(format, compensate(weight, format, hessian))
    error, size = (values - weight)[:, dead], weight[:, dead]
    # They cost nothing in calibration, and still are kept: a text may activate them.
    assert (error**2).sum() < 0.8 * (size**2).sum()
    assert loss(format, compensate(weight, format, hessian), weight, hessian) < 0.6 * loss(
        format, format.quantize(weight), weight, hessian
    )


@pytest.mark.parametrize("name", ["c2", "c6", "r4"])
def test_rows_of_any_size(name: str) -> None:
    format, (weight, hessian) = block_format(name), problem(6, 128, 5)
    expected = compensate(weight, format, hessian)
    weight = weight * np.float32(2) ** np.array([[0], [30], [-60], [100], [-20], [5]], np.float32)
    weight[5], weight[4, 64:] = 0, 0
    got = compensate(weight, format, hessian * 2.0**20)
    np.testing.assert_array_equal(got.codes[:4], expected.codes[:4])
    values = dequantize(format, got)
    assert np.isfinite(values).all()
    assert not values[5].any()
    assert np.abs(values[4, 64:]).max() < np.abs(weight[4]).max()


def test_the_same_twice_and_singular_moments() -> None:
    format, (weight, _) = block_format("c3"), problem(16, 128, 6)
    one = np.random.default_rng(0).standard_normal((1, 128))
    hessian = one.T @ one  # of a single input: without damping there is no factor
    first, second = (compensate(weight, format, hessian, damp=damp) for damp in (0.0, 0.0))
    np.testing.assert_array_equal(first.codes, second.codes)
    assert loss(format, first, weight, hessian) < 0.02 * loss(format, format.quantize(weight), weight, hessian)


def test_what_is_refused() -> None:
    weight, hessian = problem(2, 64, 7)
    with pytest.raises(LlmcError, match="q4_k only keeps"):
        compensate(weight, block_format("q4_k"), hessian)
    with pytest.raises(LlmcError, match="q4_0 only keeps"):
        compensate(weight, block_format("q4_0"), hessian)
    with pytest.raises(LlmcError, match="wanted \\(64, 64\\)"):
        compensate(weight, block_format("c4"), hessian[:32, :32])
    hessian[3, 3] = np.inf
    with pytest.raises(LlmcError, match="finite numbers"):
        compensate(weight, block_format("c4"), hessian)
    with pytest.raises(LlmcError, match="not those of any inputs"):
        compensate(weight, block_format("c4"), np.eye(64) - 1e6 * (1 - np.eye(64)))
