"""Block formats times bfloat16: on tiles, which the machine has or an emulator is, and without."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, block_format, from_bf16
from llmc.compiler.ops import OPS
from llmc.compiler.ops.narrowed import MULTIPLIED, after_linear
from llmc.targets.matrices.unpacked_products import BLOCK, FEW

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import BLOCK_FORMATS, FEW_FORMATS, TOLERANCE, Case, floats, linear_case, packed, result, run
from test_kernels import VARIANTS, WIDTHS
from test_tiles import TILED, counted, pytestmark

__all__ = ["counted", "pytestmark"]  # the emulator, and where it cannot run

SOME = ("q8", "q4", "q3h", "r4", "q4_k")  # of which all is tested that is not thorough
ROWS = (1, 2, 16, 17, FEW, FEW + 1, BLOCK, 2 * BLOCK + 30)


def linear(rng: np.random.Generator, format: str, rows: int, columns: int, width: int) -> Case:
    """A linear layer over so many columns."""
    x, weight = meaning.round_rows(floats(rng, rows, columns)), packed(rng, format, width, columns)
    return Case("bf16_linear", [x, weight], {"format": format, "width": width}, (0,))


def multiplied(case: Case, tiles: ctypes.CDLL | None) -> np.ndarray:
    """The case's result, which tiles have made."""
    before = tiles.instructions_executed() if tiles else 0
    (got,) = result(case, TILED, (np.empty((len(case.arrays[0]), case.attrs["width"]), np.float32),))
    assert tiles is None or tiles.instructions_executed() > before, "no tile was used"
    return got


def unpacked(case: Case, tiles: ctypes.CDLL | None) -> np.ndarray:
    """The weights (width, K) that the case's kernel multiplies with: what they are times ones."""
    ones = meaning.round_rows(np.eye(2 * case.arrays[0].shape[1], dtype=np.float32))
    return multiplied(replace(case, arrays=[ones, case.arrays[1]]), tiles).T


def compare(case: Case, got: np.ndarray, weights: np.ndarray) -> None:
    """The products with these weights, in float32."""
    rounded = from_bf16(np.ascontiguousarray(case.arrays[0]).view(np.uint16))
    wanted = rounded.astype(np.float64) @ weights.T.astype(np.float64)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * float(np.abs(wanted).max()))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.thorough_if(case=lambda format: format not in SOME)
def test_weights_are_the_nearest_bfloat16_or_nearly(format: str, counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng([*map(ord, format)])
    case = linear(rng, format, 1, 256, 33)
    stored = FORMATS[format].stored(case.arrays[1], 33, 256)
    found = unpacked(case, counted)
    steps = np.ldexp(np.float32(1), np.frexp(stored)[1] - 8)  # between numbers in bfloat16 of that size
    slack = 3e-4 * np.abs(stored).max(1, keepdims=True)  # sums of a scale times a code and a minimum are rounded, too
    by_row = block_format(format).scale == "row"  # a row's scale is of sums: they are not bfloat16 with it
    assert np.all(np.abs(found - stored) <= 0.7 * steps * (2 if by_row else 1) + slack)
    if block_format(format).whole:
        np.testing.assert_array_equal(found[stored == 0], 0)
    if not by_row:
        np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.uint32) & 0xFFFF, 0)


def test_weights_that_are_bfloat16_stay_what_they_are(counted: ctypes.CDLL | None) -> None:
    """Whole numbers up to 127 times a power of two, as those are that a model was trained with."""
    rng = np.random.default_rng(0)
    weights = np.ldexp(rng.integers(-127, 128, (16, 64)), -9).astype(np.float32)
    weights[:, ::32] = 127 / 512  # so that a block's scale is that power of two
    packed_weights = FORMATS["q8"].pack(weights)
    np.testing.assert_array_equal(FORMATS["q8"].stored(packed_weights, 16, 64), weights)
    case = Case("bf16_linear", [np.zeros((1, 32), np.int32), packed_weights], {"format": "q8", "width": 16}, (0,))
    np.testing.assert_array_equal(unpacked(case, counted), weights)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.thorough_if(case=lambda format: format not in SOME)
def test_a_row_has_the_same_bits_beside_others(format: str, counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng([*map(ord, format)])
    case = linear(rng, format, ROWS[-1], 256, 80)
    together = multiplied(case, counted)
    compare(case, together, unpacked(case, counted))
    for rows in ROWS[:-1]:
        first = int(rng.integers(0, len(together) - rows))
        some = replace(case, arrays=[case.arrays[0][first : first + rows].copy(), case.arrays[1]])
        np.testing.assert_array_equal(multiplied(some, counted), together[first : first + rows], err_msg=f"{rows} rows")


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 7, 8, 15])
@pytest.mark.thorough_if(case=lambda chunks: chunks not in (1, 3, 8))
def test_columns_go_through_panels_of_any_number_of_chunks(chunks: int, counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng(chunks)
    width = int(rng.choice([1, 16, 33, 64, 150]))
    for rows in (3, BLOCK + 17):
        case = linear(rng, "q4", rows, 64 * chunks, width)
        compare(case, multiplied(case, counted), unpacked(case, counted))


@pytest.mark.parametrize("format", ["q8", "q4", "q3h", "r4"])
@pytest.mark.parametrize("op", MULTIPLIED)
@pytest.mark.thorough_if(case=lambda op, format: (op, format) not in (("gated", "q4"), ("activate", "q3h")))
def test_an_activation_has_the_bits_of_the_ops_apart(op: str, format: str, counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng([*map(ord, op + format)])
    attrs: dict[str, str | float] = {"activation": "gelu_tanh"}
    attrs |= {"limit": 0.5, "plus": 1.0} if op == "bounded_gated" else {}
    width = 64 * int(rng.integers(1, 4)) * (2 if "gated" in op else 1)
    plain = linear(rng, format, ROWS[-1], 256, width)
    ending = "_bf16"
    name, both = after_linear(plain.op, op + ending), plain.attrs | attrs
    like = OPS[name].meaning(*plain.arrays, **both)
    (apart,) = result(Case(op + ending, [multiplied(plain, counted)], attrs, (0,)), TILED, (like,))
    for rows in ROWS:
        fused = Case(name, [plain.arrays[0][:rows].copy(), plain.arrays[1]], both, (0,))
        (got,) = result(fused, TILED, (like[:rows],))
        np.testing.assert_array_equal(got, apart[:rows], err_msg=f"{rows} rows")


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("format", FEW_FORMATS)
@pytest.mark.thorough_if(case=lambda format, variant: variant != "avx2" or format not in ("q4", "q3h", "q8"))
def test_without_tiles_weights_are_not_rounded(format: str, variant: str) -> None:
    target = VARIANTS[variant]
    without = replace(target, requires=tuple(flag for flag in target.requires if not flag.startswith("amx")))
    run(linear_case(np.random.default_rng([*map(ord, format)]), "bf16_linear", format, rows=9), without)


def test_columns_that_are_no_whole_chunks_go_without_tiles() -> None:
    run(linear(np.random.default_rng(1), "q4", 9, 96, 40), TILED)
