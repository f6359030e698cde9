"""Attention over bf16 pages where rounded weights hide nothing: one token's value, a plain mean, other instructions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.formats import from_bf16, to_bf16
from llmc.compiler.kv_pages import KINDS

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import attention
from kernel_cases import TOLERANCE, Case, result
from test_kernels import DISTINCT, VARIANTS

from llmc.compiler.ops import OPS

LENGTHS = [(300, 3), (37, 9), (0, 1), (16, 1), (0, 30)]  # past and new rows: blocks, rows alone, ends in a pair
SIZES = (7, 33, 64)
TILE_FLAGS = {"amx_tile", "amx_int8", "amx_bf16"}
PAIRED = [name for name in ("native", "avx512", "avx2", "portable") if name in DISTINCT]


def _case(size: int) -> Case:
    rng = np.random.default_rng(size)
    plain = {"window": 0, "soft_cap": 0.0, "bias": "none", "causal": 1, "scale": 1.0}
    case = attention(rng, "bf16", lengths=LENGTHS, heads=6, kv_heads=2, head_dim=size, **plain)
    case.arrays[4][...] = 0  # no holes
    return case


def _like(case: Case) -> tuple[np.ndarray, ...]:
    return (np.empty((len(case.arrays[0]), case.attrs["heads"] * case.attrs["head_dim"]), np.float32),)


def _tokens(case: Case, row: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V (G, T, D) that a row sees, as the pages hold them after the step."""
    kv = case.arrays[1].copy()
    qkv, _, seqs, slots, _, indptr, ids = case.arrays
    OPS["attention"].meaning(qkv, kv, *case.arrays[2:], **case.attrs)
    seen = np.arange(slots[row] + 1)
    keys, values = KINDS["bf16"].load(kv[ids[indptr[seqs[row]] :][seen // 16]], case.attrs["head_dim"])
    return keys[seen, :, :, seen % 16].swapaxes(0, 1), values[seen, :, seen % 16].swapaxes(0, 1)


def _with_one_answer(case: Case) -> np.ndarray:
    """Queries such that all but one token weigh next to nothing; the values (M, H D) of those."""
    size, rng = case.attrs["head_dim"], np.random.default_rng(case.attrs["head_dim"] + 1)
    qkv, wanted = case.arrays[0], _like(case)[0]
    for row in range(len(qkv)):
        keys, values = _tokens(case, row)
        for head in range(6):
            query = from_bf16(to_bf16(rng.standard_normal(size).astype(np.float32)))
            products = keys[head // 3] @ query
            gap = np.diff(np.sort(products)[-2:]) if len(products) > 1 else 1
            at = slice(head * size, (head + 1) * size)
            qkv[row, at] = query * np.float32(2) ** np.ceil(np.log2(200 / gap))
            wanted[row, at] = values[head // 3, np.argmax(products)]
    return wanted


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", PAIRED)
def test_weights_that_need_no_rounding_give_what_they_should(size: int, variant: str) -> None:
    """One token's value, to the last bit, whichever place of a pair it has; and of a query of zeros, the mean."""
    case = _case(size)
    wanted = _with_one_answer(case)
    np.testing.assert_array_equal(result(case, VARIANTS[variant], _like(case))[0], wanted)
    case.arrays[0][:, : 6 * size] = 0
    means = [np.repeat(_tokens(case, row)[1].mean(1), 3, axis=0) for row in range(len(case.arrays[0]))]
    got = result(case, VARIANTS[variant], _like(case))[0]
    np.testing.assert_allclose(got, np.reshape(means, got.shape), rtol=0, atol=4 * TOLERANCE)


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_bits_are_the_same_with_and_without_an_instruction_for_pairs(size: int) -> None:
    """But for tiles, which add up in an order of their own."""
    case = _case(size)
    without = [replace(VARIANTS[n], requires=tuple(set(VARIANTS[n].requires) - TILE_FLAGS)) for n in PAIRED]
    first, *others = (result(case, target, _like(case))[0] for target in without if target.has("fma"))
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_weights_are_wrong_by_no_more_than_their_rounding() -> None:
    """Root mean square: a rounded number is wrong by 2^-9 / sqrt(3) of itself on average, and errors cancel."""
    case = _case(64)
    case.arrays[0][:, : 6 * 64] /= 8
    got = result(case, VARIANTS["native"], _like(case))[0]
    wanted = OPS["attention"].meaning(*[array.copy() for array in case.arrays], **case.attrs)
    assert 0 < np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()) < 2**-9
