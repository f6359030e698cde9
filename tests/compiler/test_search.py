"""The scale search of our codebook formats: small errors, exact codes, and no input that breaks it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmc.compiler.formats import BlockFormat, Quantized, dequantize
from llmc.compiler.formats import block_format as any_format
from llmc.compiler.formats.codebooks import CODEBOOKS
from llmc.compiler.formats.search import PADDING, search

# Least signal to noise, in dB, on Gaussian weights: Q2_K 10.5, Q3_K 16.4, Q4_K 22.9, Q5_K 28.8, Q6_K 35.0, each of
# which has 0.1 to 0.4 bits more than the next of ours below.
DECIBELS = {"c2": 10.4, "c2h": 13.4, "c3": 16.6, "c3h": 19.7, "c4": 22.4, "c5": 28.5, "c6": 34.3,
            "r3h": 19.2, "r4": 21.7, "r5": 27.8, "r6": 33.8}  # fmt: skip
SHAPES = {"rows": st.integers(1, 9), "columns": st.integers(64, 300), "seed": st.integers(0, 1000)}


def block_format(name: str) -> BlockFormat:
    """The format as the search sees it: what it is given is rotated already."""
    return replace(any_format(name), rotated=False)


def weights(rows: int, columns: int, seed: int, tails: float = 5) -> np.ndarray:
    """Student t with `tails` degrees of freedom: heavier tails than Gaussian weights."""
    return np.random.default_rng(seed).standard_t(tails, (rows, columns)).astype(np.float32)


def scales_of(format: BlockFormat, quantized: Quantized) -> np.ndarray:
    """(N, K padded): every weight's scale."""
    sub, row = (quantized.tables[which].astype(np.float64) for which in ("sub_scale", "row_scale"))
    return np.repeat(row[:, None] * sub * np.abs(sub), format.block, axis=1)


def decoded(format: BlockFormat, quantized: Quantized, columns: int) -> np.ndarray:
    return dequantize(format, quantized)[:, :columns].astype(np.float64)


def error(format: BlockFormat, quantized: Quantized, weight: np.ndarray, importance: np.ndarray | float = 1.0) -> float:
    return float((importance * (decoded(format, quantized, weight.shape[1]) - weight) ** 2).sum())


def absmax_error(format: BlockFormat, weight: np.ndarray) -> float:
    """Each block's greatest magnitude on the codebook's greatest entry, the nearest entry for every code."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // 64) * 64))
    padded[:, :columns] = weight
    values = format.values.astype(np.float64).reshape(len(format.values), -1) - 64
    if format.pair:
        x = padded.reshape(rows, -1, format.block // 8, 2, 4).transpose(0, 1, 2, 4, 3).reshape(-1, format.block // 2, 2)
    else:
        x = padded.reshape(-1, format.block, 1)
    scale = np.maximum(np.abs(x).max((1, 2), keepdims=True), 1e-9) / np.abs(values).max()
    apart = ((x[:, :, None] / scale[..., None] - values) ** 2).sum(-1).min(-1)
    return float((apart * scale[..., 0] ** 2).sum())


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebooks_are_what_kernels_and_quantizers_expect(name: str) -> None:
    table, format = CODEBOOKS[name], block_format(name)
    assert table.dtype == np.uint8
    assert table.shape == ((1 << sum(format.planes), 2) if format.pair else (1 << sum(format.planes),))
    assert table.max() <= 127
    assert len(np.unique(table, axis=0)) == len(table)
    assert format.pair or (np.diff(table.astype(int)) > 0).all()


@pytest.mark.parametrize("name", DECIBELS)
def test_error_on_gaussian_weights(name: str) -> None:
    weight = np.random.default_rng(0).standard_normal((32, 1024)).astype(np.float32)
    relative = error(block_format(name), search(weight, block_format(name)), weight) / float((weight**2).sum())
    assert -10 * np.log10(relative) > DECIBELS[name]


@pytest.mark.parametrize("name", CODEBOOKS)
@settings(max_examples=8, deadline=None)
@given(**SHAPES)
def test_searched_scales_beat_the_greatest_magnitude(name: str, rows: int, columns: int, seed: int) -> None:
    weight, format = weights(rows, columns, seed), block_format(name)
    assert error(format, search(weight, format), weight) < absmax_error(format, weight)


@pytest.mark.parametrize("name", CODEBOOKS)
@settings(max_examples=8, deadline=None)
@given(**SHAPES, weighted=st.booleans())
@example(rows=1, columns=150, seed=746, weighted=True)  # a pair of which one is padding, and two codes nearly as near
@example(rows=2, columns=65, seed=843, weighted=False)  # the same, of weights that are 60 times the scale
def test_codes_are_the_nearest_for_the_stored_scales(
    name: str, rows: int, columns: int, seed: int, weighted: bool
) -> None:
    weight, format = weights(rows, columns, seed, tails=2), block_format(name)
    importance = np.random.default_rng(seed).uniform(0.1, 4, columns).astype(np.float32) if weighted else None
    quantized = search(weight, format, importance)
    scale = scales_of(format, quantized)
    known = np.ones(columns) if importance is None else importance
    h = np.full(scale.shape[1], PADDING * known.mean())  # what is beyond the width weighs a little in choosing, too
    h[:columns] = known
    padded = np.zeros(scale.shape)
    padded[:, :columns] = weight
    values = format.values.astype(np.float64).reshape(len(format.values), -1) - 64
    width = values.shape[1]
    # (N, codes, width) each
    x, s, h = (
        np.broadcast_to(a, padded.shape).reshape(rows, -1, width, 4).transpose(0, 1, 3, 2).reshape(rows, -1, width)
        for a in (padded, scale, h)
    )
    apart = (h[:, :, None] * (x[:, :, None] - s[:, :, None] * values) ** 2).sum(-1)
    chosen = np.take_along_axis(apart, quantized.codes[..., None].astype(np.intp), axis=2)[..., 0]
    rounding = 1e-5 * (h * s**2).sum(2) + 2e-7 * (h * x**2).sum(2)  # distances are float32, of squares up to that of x
    assert (chosen <= apart.min(2) * (1 + 1e-3) + rounding).all()


@pytest.mark.parametrize("name", ["c2", "c3h", "c4"])
@settings(max_examples=8, deadline=None)
@given(**SHAPES)
def test_importance_moves_the_error_to_where_it_costs_less(name: str, rows: int, columns: int, seed: int) -> None:
    weight, format = weights(rows, columns, seed), block_format(name)
    importance = np.random.default_rng(seed).lognormal(0, 1.5, columns).astype(np.float32)
    with_it, without = (error(format, search(weight, format, i), weight, importance) for i in (importance, None))
    assert with_it < without
    same = search(weight, format, np.full(columns, 7, np.float32))
    np.testing.assert_allclose(error(format, same, weight), error(format, search(weight, format), weight), rtol=0.02)


@pytest.mark.parametrize("name", ["c2", "c3h", "c5"])
def test_columns_without_importance_are_kept_all_the_same(name: str) -> None:
    weight, format = weights(8, 128, 4), block_format(name)
    idle = np.arange(128) % 8 >= 4 if format.pair else np.arange(128) % 2 == 1
    for columns in (idle, np.arange(128) < 64):
        quantized = search(weight, format, np.where(columns, 0, 1).astype(np.float32))
        left = decoded(format, quantized, 128)[:, columns] - weight[:, columns]
        assert (left**2).sum() < 0.9 * (weight[:, columns] ** 2).sum()


EDGES = {
    "zeros": np.zeros((3, 70)),
    "one column": np.array([[1.0], [-2.0], [0.0]]),
    "a zero row": np.array([[0.0] * 64, [1.0] * 64]),
    "huge": weights(2, 64, 0) * 1e36,
    "all alike and huge": np.full((1, 65), 2e37),
    "subnormal": weights(2, 64, 1) * 1e-42,
    "all over the range": weights(2, 128, 2) * np.logspace(-44, 36, 128),
    "blocks far apart": np.repeat([1e-30, 1.0, 1e-10, 0.0], 32)[None] * weights(2, 128, 3),
}


@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_stay_finite_and_bounded(name: str, edge: str) -> None:
    weight, format = EDGES[edge].astype(np.float32), block_format(name)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        quantized = search(weight, format)
    values = decoded(format, quantized, weight.shape[1])
    assert np.isfinite(quantized.tables["row_scale"]).all()
    top = np.abs(weight.astype(np.float64)).max(1, keepdims=True)
    # A row of subnormals may round its scale, about 1e-6 of it, to nothing.
    assert (np.abs(values - weight) <= (1.0 if edge == "subnormal" else 0.5) * top).all()
    assert (values[top[:, 0] == 0] == 0).all()


@pytest.mark.parametrize("name", CODEBOOKS)
def test_an_outlier_costs_its_own_block_only(name: str) -> None:
    weight, format = weights(1, 256, 5), block_format(name)
    hit = weight.copy()
    hit[0, 40] = 60.0
    values = decoded(format, search(hit, format), 256)
    assert abs(values[0, 40] - 60) < 0.15 * 60
    apart = np.r_[0 : 40 // format.block * format.block, 64:256]
    plain = decoded(format, search(weight, format), 256)
    before, after = ((v[0, apart] - weight[0, apart]) ** 2 for v in (plain, values))
    assert after.sum() < 1.3 * before.sum()


@pytest.mark.parametrize("name", CODEBOOKS)
def test_constant_blocks_are_near(name: str) -> None:
    # The codebooks are made for noise: c2h has no pair of equal values better than this.
    weight, format = np.full((2, 96), -3.5, np.float32), block_format(name)
    assert np.abs(decoded(format, search(weight, format), 96) + 3.5).max() < 0.16 * 3.5


@pytest.mark.parametrize("name", CODEBOOKS)
def test_padding_decodes_to_about_nothing_and_costs_nothing(name: str) -> None:
    format = block_format(name)
    width = format.block + 1
    weight = weights(4, width, 6)
    quantized = search(weight, format)
    whole = dequantize(format, quantized)
    assert whole.shape == (4, -(-width // 64) * 64)
    if not format.pair:  # of a pair, the entry is the one that suits the real column
        assert (np.abs(whole[:, width:]) <= 3 * np.abs(scales_of(format, quantized)[:, width:])).all()
    one = decoded(format, quantized, width)[:, -1]  # alone in its block: the scale is for it
    assert (np.abs(one - weight[:, -1]) <= 0.01 * np.abs(weight).max(1)).all()


@pytest.mark.parametrize("name", CODEBOOKS)
@settings(max_examples=8, deadline=None)
@given(**SHAPES, at=st.integers(0, 8), power=st.integers(-60, 60))
def test_rows_are_independent_and_scales_are_exact(
    name: str, rows: int, columns: int, seed: int, at: int, power: int
) -> None:
    weight, format = weights(rows, columns, seed), block_format(name)
    whole = search(weight, format)
    row = at % rows
    one = search(weight[row : row + 1] * np.float32(2.0**power), format)
    np.testing.assert_array_equal(one.codes[0], whole.codes[row])
    np.testing.assert_array_equal(one.tables["sub_scale"][0], whole.tables["sub_scale"][row])
    assert one.tables["row_scale"][0] == whole.tables["row_scale"][row] * np.float32(2.0**power)


@pytest.mark.parametrize("name", ["c2", "c3h", "c6"])
def test_the_sign_of_a_scale_mirrors_the_codebook(name: str) -> None:
    weight, format = weights(8, 256, 8), block_format(name)
    plus, minus = search(weight, format), search(-weight, format)
    np.testing.assert_array_equal(dequantize(format, plus), -dequantize(format, minus))
    signs = np.sign(plus.tables["sub_scale"])
    assert {-1, 1} <= set(signs.ravel())


def test_two_threads_get_what_one_gets() -> None:
    format = block_format("c3h")
    matrices = [weights(40, 512, seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda weight: search(weight, format), matrices))
    for weight, quantized in zip(matrices, together, strict=True):
        np.testing.assert_array_equal(quantized.codes, search(weight, format).codes)


def test_a_format_without_a_codebook_is_refused() -> None:
    with pytest.raises(ValueError, match="q4: wanted a codebook"):
        search(weights(1, 64, 0), block_format("q4"))
