"""Every kernel of latent attention against its NumPy meaning, for every format and kind of CPU this machine can run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.kv_pages import KINDS

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import attention
from kernel_cases import BLOCK_FORMATS, FEW_FORMATS, fixed, run
from latent_kernel_cases import LATENT_CASES, head_linear_case
from test_kernels import VARIANTS, WIDTHS


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("op", LATENT_CASES)
def test_kernel_equals_its_meaning(op: str, variant: str) -> None:
    rng = np.random.default_rng([*map(ord, op + variant)])
    run(LATENT_CASES[op](rng), VARIANTS[variant])


@pytest.mark.parametrize("kind", KINDS)
def test_many_heads_that_share_a_key_are_several_tasks(kind: str) -> None:
    rng = np.random.default_rng([*map(ord, kind)])
    run(attention(rng, kind, heads=48, kv_heads=2, head_dim=40, scale=0.2), VARIANTS["native"])


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.thorough_if(case=lambda format: format not in FEW_FORMATS)
def test_every_block_format_equals_its_meaning(format: str) -> None:
    run(fixed(head_linear_case(np.random.default_rng([*map(ord, format)]), "i8", format)), VARIANTS["native"])
