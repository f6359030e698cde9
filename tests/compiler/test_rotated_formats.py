"""Rotated formats: what is asked for stays natural, what is stored is rotated, and outliers cost less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.formats import (
    FORMATS,
    MIDDLE,
    ROTATED,
    BlockFormat,
    block_format,
    ceil_to,
    decode,
    quantize_rotated,
    quantize_rows,
    rotate_rows,
)
from llmc.compiler.formats.block import scales, spread
from llmc.compiler.formats.codebooks import CODEBOOKS
from llmc.compiler.formats.search import ZERO
from llmc.compiler.hadamard import hadamard

NAMES = [name for name, format in FORMATS.items() if isinstance(format, BlockFormat) and format.rotated]
# Root mean square of a weight's error over that of a weight: Gaussian weights, and what tails may add.
ERRORS = {"r8": 0.0065, "r6": 0.021, "r5": 0.041, "r4": 0.083, "r3h": 0.111}
SHAPES = {"rows": st.integers(1, 40), "columns": st.integers(1, 300), "seed": st.integers(0, 1000)}


def gaussian(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def with_outliers(rows: int, columns: int, seed: int, size: float = 12) -> np.ndarray:
    """One number of every 64 is as large as `size`."""
    x = gaussian(rows, columns, seed)
    at = np.arange(0, columns, ROTATED) + np.random.default_rng(seed).integers(0, ROTATED, (rows, columns // ROTATED))
    np.put_along_axis(x, at, np.float32(size) * np.sign(np.take_along_axis(x, at, 1)), 1)
    return x


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_there_is_one_for_each_number_of_bits() -> None:
    assert list(ERRORS) == NAMES


# --- the rotation ------------------------------------------------------------------------------


@settings(deadline=None)
@given(**SHAPES, outputs=st.integers(1, 9))
def test_rotating_twice_is_no_rotation_and_products_stay(rows: int, columns: int, seed: int, outputs: int) -> None:
    x, weight = gaussian(rows, columns, seed), gaussian(outputs, columns, seed + 1)
    rotated = rotate_rows(x)
    assert rotated.shape == (rows, ceil_to(columns, ROTATED))
    back = rotate_rows(rotated)
    np.testing.assert_allclose(back[:, :columns], x, atol=1e-5)
    np.testing.assert_allclose(back[:, columns:], 0, atol=1e-5)
    np.testing.assert_allclose(rotated @ rotate_rows(weight).T, x @ weight.T, atol=1e-5 * 8 * columns**0.5)


@given(columns=st.integers(1, 300), seed=st.integers(0, 100))
def test_importance_is_that_of_inputs_that_are_rotated(columns: int, seed: int) -> None:
    """Inputs without correlation: their second moments, rotated, have it on the diagonal."""
    importance = np.random.default_rng(seed).lognormal(0, 2, columns).astype(np.float32)
    rotated = rotate_rows(rotate_rows(np.diag(importance)).T)
    np.testing.assert_allclose(spread(importance), np.diag(rotated), rtol=1e-4)


# --- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(**SHAPES)
def test_unpack_is_natural_and_stored_is_rotated(name: str, rows: int, columns: int, seed: int) -> None:
    weight, format = gaussian(rows, columns, seed), block_format(name)
    packed = format.pack(weight)
    natural = format.unpack(packed, rows, columns)
    stored = format.stored(packed, rows, ceil_to(columns, ROTATED))
    np.testing.assert_allclose(rotate_rows(stored)[:, :columns], natural, atol=1e-5)
    assert relative(stored, rotate_rows(weight)) < 2 * ERRORS[name]  # of few weights, twice the usual


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [512, 500])
def test_errors_are_those_of_the_number_of_bits(name: str, columns: int) -> None:
    weight, format = gaussian(48, columns, 1), block_format(name)
    assert relative(format.unpack(format.pack(weight), 48, columns), weight) < ERRORS[name]


@pytest.mark.parametrize(("rotated", "plain"), [("r8", "q8"), ("r6", "c6"), ("r5", "c5"), ("r4", "c4"), ("r3h", "c3h")])
def test_a_row_of_outliers_loses_less_than_in_blocks_that_are_not_rotated(rotated: str, plain: str) -> None:
    weight = with_outliers(24, 512, 2)
    lost = {}
    for name in (rotated, plain):
        format = block_format(name)
        lost[name] = relative(format.unpack(format.pack(weight), *weight.shape), weight)
    assert lost[rotated] < 0.9 * lost[plain]


@pytest.mark.parametrize("name", NAMES)
def test_equal_weights_are_one_number_and_zeros(name: str) -> None:
    if name in CODEBOOKS:
        zero = np.full(CODEBOOKS[name].shape[1:], ZERO)
        assert (CODEBOOKS[name] == zero).reshape(len(CODEBOOKS[name]), -1).all(1).any()
    weight, format = np.full((2, 128), 0.37, np.float32), block_format(name)
    assert relative(format.unpack(format.pack(weight), 2, 128), weight) < 0.02


@settings(max_examples=30, deadline=None)
@given(**SHAPES, tails=st.sampled_from([1, 2, 5, 30]), quiet=st.integers(0, 4))
def test_no_code_of_r8_clips(rows: int, columns: int, seed: int, tails: int, quiet: int) -> None:
    """The nearest step is never beyond the last one, and a block's scale hardly greater than it must be."""
    format, rng = block_format("r8"), np.random.default_rng(seed)
    weight = rng.standard_t(tails, (rows, columns)).astype(np.float32)
    weight[rng.integers(rows)] = 0
    weight[:, quiet * ROTATED : (quiet + 1) * ROTATED] = 0
    wanted = rotate_rows(weight)
    packed = format.pack(weight)
    quantized = decode(format, packed, rows, columns)
    scale, _ = scales(format, quantized.tables)
    assert quantized.codes.reshape(*scale.shape, -1)[scale > 0].min(initial=1) >= 1  # 0 would be -128 steps
    error = np.abs(format.stored(packed, rows, wanted.shape[1]) - wanted).reshape(*scale.shape, ROTATED).max(-1)
    top = np.abs(wanted).reshape(*scale.shape, ROTATED).max(-1)
    assert (error <= scale * (0.5 + 1e-4)).all()
    root = np.sqrt(top / 127) + np.sqrt(top.max(1, keepdims=True)) / 127 / 127**0.5  # a sub-scale's step more
    assert (scale <= root**2 * (1 + 1e-4)).all()
    assert (scale[top == 0] == 0).all()
    assert not format.stored(packed, rows, wanted.shape[1]).reshape(*scale.shape, ROTATED)[top == 0].any()


# --- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(**SHAPES, count=st.integers(1, 5))
def test_products_of_rotated_int8_rows_are_those_of_the_rows(
    name: str, rows: int, columns: int, seed: int, count: int
) -> None:
    x, format = with_outliers(count, 512, seed)[:, :columns].copy(), block_format(name)
    packed = format.pack(gaussian(rows, columns, seed + 1))
    natural, stored = format.unpack(packed, rows, columns), format.stored(packed, rows, ceil_to(columns, ROTATED))
    codes, scale, starts = quantize_rotated(x)
    products = (codes.reshape(count, -1, ROTATED) * scale[..., None]).reshape(count, -1) @ stored.T
    # Half a step is 1/254 of the greatest number of a block, which is at most eight times what is usual in it.
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(natural, axis=1)
    assert (np.abs(products - x @ natural.T) <= 0.04 * lengths + 1e-5).all()
    np.testing.assert_array_equal(starts, -MIDDLE * codes.reshape(count, -1, ROTATED).sum(-1, dtype=np.int32))


def test_whole_numbers_of_a_block_are_summed_from_its_start() -> None:
    """A dot of int8 with codes u8 that begins with `starts` is the dot with what the codes stand for."""
    format, weight, x = block_format("r8"), gaussian(7, 192, 3), gaussian(3, 192, 4)
    quantized = format.quantize(weight)
    codes, scale, starts = quantize_rotated(x)
    blocks = (codes.reshape(3, 1, -1, ROTATED), quantized.codes.reshape(1, 7, -1, ROTATED).astype(np.int32))
    dots = starts[:, None] + (blocks[0] * blocks[1]).sum(-1)
    steps, _ = scales(format, quantized.tables)
    products = (dots * scale[:, None] * steps).sum(-1)
    assert relative(products, x @ weight.T) < 0.02


def test_outliers_of_activations_cost_less_rotated() -> None:
    """Though a scale serves twice as many columns."""
    x = with_outliers(32, 512, 5, size=60)
    codes, scale, _, _ = quantize_rows(x)
    plain = (codes.reshape(*scale.shape, -1) * scale[..., None]).reshape(x.shape)
    codes, scale, _ = quantize_rotated(x)
    rotated = rotate_rows((codes.reshape(*scale.shape, -1) * scale[..., None]).reshape(x.shape))
    assert relative(rotated, x) < 0.7 * relative(plain, x)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block", [1, 2, 64])
def test_what_is_rotated_stays_as_it_is(rows: int, block: int) -> None:
    """One block too, whose columns and rows lie alike in memory."""
    x = gaussian(rows, block, 7)
    before = x.copy()
    np.testing.assert_allclose(hadamard(hadamard(x, block), block), before, atol=1e-5)
    np.testing.assert_array_equal(x, before)
