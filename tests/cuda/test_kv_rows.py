"""K, V and queries of a step's rows, as launches of few rows and of many write them into pages of bfloat16."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.ops import OPS

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
from attention_cases import attention
from kernel_cases import floats
from test_cuda_kernels import call


@pytest.mark.parametrize(
    ("size", "turned", "layout"),
    [(32, 32, "half"), (32, 16, "half"), (32, 32, "interleaved"), (80, 0, ""), (144, 0, "")],
)
def test_steps_of_many_rows_write_what_steps_of_few_do(size: int, turned: int, layout: str) -> None:
    """Pages and results, bit by bit; pairs of tokens of V are neighbouring rows, or not, or one of a sequence's end."""
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": size, "bias": "none", "causal": 1, "window": 0}
    case = attention(np.random.default_rng(size), "bf16", lengths=[(6, 34), (3, 22), (0, 15)], **sizes)
    if turned:
        qkv, *pages = case.arrays
        table, attrs = floats(np.random.default_rng(9), len(qkv), turned), {**case.attrs, "layout": layout}
        case = replace(case, op="rope_attention", arrays=[qkv, table, *pages], attrs=attrs, symbolic=tuple(range(8)))
    copies, many = ([a.copy() for a in case.arrays] for _ in range(2))
    like, kv = OPS[case.op].meaning(*copies, **case.attrs), len(copies) - 6
    whole = call(replace(case, arrays=many), [like])[0]
    np.testing.assert_array_equal(many[kv], copies[kv])
    for rows in (slice(0, 36), slice(36, None)):
        picked = [a[rows].copy() if len(a) == len(whole) else a for a in case.arrays]
        np.testing.assert_array_equal(call(replace(case, arrays=picked), [like[rows]])[0], whole[rows])
    np.testing.assert_array_equal(case.arrays[kv], many[kv])
