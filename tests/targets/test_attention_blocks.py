"""A row's attention is the same to the last bit whichever rows stand beside it, for every kind of pages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import tirx

from llmc.compiler.kv_pages import KINDS
from llmc.targets.build import compile_kernels
from llmc.targets.lower import make_kernel

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import attention
from kernel_cases import Case, compare, fenced
from test_kernels import VARIANTS

from llmc.compiler.ops import OPS

# Past and new rows: in a block, in several, alone, over the border of a chunk (256 tokens) and beyond several.
LENGTHS = [(0, 3), (250, 41), (0, 1), (700, 1), (255, 2), (10, 9), (521, 30)]
Kernel = Callable[[list[np.ndarray], np.ndarray], np.ndarray]


def _kernel(case: Case, variant: str = "native") -> Kernel:
    """The attention of a case for any number of rows, sequences and pages; pages are changed in place."""
    width = case.attrs["heads"] * case.attrs["head_dim"]
    shapes: list[list[int | tirx.Var]] = [
        [tirx.Var(f"n{min(i, 1 if 1 < i < 4 else i)}", "int64"), *a.shape[1:]] for i, a in enumerate(case.arrays)
    ]
    shapes[2][0] = shapes[3][0] = shapes[0][0]
    made = make_kernel(case.op, VARIANTS[variant], [*shapes, [shapes[0][0], width]], case.attrs)
    kernel = compile_kernels({"kernel": made}, VARIANTS[variant])["kernel"]

    def call(arrays: list[np.ndarray], kv: np.ndarray) -> np.ndarray:
        inputs = [fenced(array) for array in [arrays[0], kv, *arrays[2:]]]
        out = tvm.runtime.tensor(np.full((len(arrays[0]), width), 77, np.float32))
        kernel(*inputs, out)
        kv[...] = inputs[1].numpy()
        return out.numpy()

    return call


def _rows(arrays: list[np.ndarray], rows: np.ndarray) -> list[np.ndarray]:
    """The same step with some of its rows."""
    return [a[rows] if i in (0, 2, 3) else a for i, a in enumerate(arrays)]


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_same_bits(kind: str, window: int) -> None:
    rng = np.random.default_rng([window, *map(ord, kind)])
    case = attention(rng, kind, lengths=LENGTHS, causal=1, window=window, heads=6, kv_heads=2, head_dim=20)
    kernel = _kernel(case)
    kv = case.arrays[1].copy()
    together = kernel(case.arrays, kv)
    expected = OPS[case.op].meaning(*[a.copy() for a in case.arrays], **case.attrs)
    compare(case, together, expected)
    rows = len(together)
    for some in (slice(i, i + 1) for i in range(0, rows, 5)):
        np.testing.assert_array_equal(kernel(_rows(case.arrays, np.arange(rows)[some]), kv), together[some])
    for size in (4, 7, 23):  # rows of a text in other blocks, beside those of other texts
        for start in range(0, rows, size):
            some = slice(start, start + size)
            np.testing.assert_array_equal(kernel(_rows(case.arrays, np.arange(rows)[some]), kv), together[some])


@pytest.mark.parametrize("heads", [1, 7, 13, 26])
def test_groups_of_any_number_of_heads(heads: int) -> None:
    """Blocks of 24 rows, of three, of one; heads in two tasks; 26 are two groups whose sums share registers."""
    rng = np.random.default_rng(heads)
    case = attention(rng, "bf16", lengths=LENGTHS, heads=2 * heads, kv_heads=2, head_dim=16)
    kv = case.arrays[1].copy()
    compare(case, _kernel(case)(case.arrays, kv), OPS[case.op].meaning(*[a.copy() for a in case.arrays], **case.attrs))


@pytest.mark.parametrize("variant", [name for name in ("avx2", "portable") if name in VARIANTS])
def test_sums_of_narrow_registers(variant: str) -> None:
    rng = np.random.default_rng([*map(ord, variant)])
    case = attention(rng, "bf16", lengths=[(250, 20), (300, 1)], heads=6, kv_heads=2, head_dim=20)
    kernel, kv = _kernel(case, variant), case.arrays[1].copy()
    compare(case, kernel(case.arrays, kv), OPS[case.op].meaning(*[a.copy() for a in case.arrays], **case.attrs))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_places_that_were_never_written_may_hold_anything(kind: str) -> None:
    """NaN after the last row of a text, where numbers are plain."""
    rng = np.random.default_rng(5)
    case = attention(rng, kind, lengths=LENGTHS, heads=6, kv_heads=2, head_dim=16, causal=1)
    kernel, kv = _kernel(case), case.arrays[1].copy()
    expected = kernel(case.arrays, kv)
    blank = np.full_like(kv, np.nan if kind == "f32" else 0x7FC0)
    for s, (past, _) in enumerate(LENGTHS):
        for slot in range(past):
            page, place = case.arrays[6][case.arrays[5][s] + slot // 16], slot % 16
            k, v = KINDS[kind].load(kv[page][None], 16)
            KINDS[kind].store(blank, page, place, k[0, :, :, place], v[0, :, place])
    np.testing.assert_array_equal(kernel(replace(case).arrays, blank), expected)
