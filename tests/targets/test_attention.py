"""Every kernel of attention against its NumPy meaning, for every kind of pages and of CPU this machine can run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.kv_pages import KINDS

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import ATTENTION_CASES, SIZES, attention, turning
from kernel_cases import run
from test_kernels import VARIANTS, WIDTHS


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("op", ATTENTION_CASES)
def test_kernel_equals_its_meaning(op: str, variant: str) -> None:
    """Kinds of pages and what scores are made of know nothing of each other: one kind stands for all in some."""
    rng = np.random.default_rng([*map(ord, op + variant)])
    every = variant == "native" or op == "attention"
    for kind in KINDS if every else [str(rng.choice(list(KINDS)))]:
        run(ATTENTION_CASES[op](rng, kind), VARIANTS[variant])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough_if(case=lambda kind, size: size in (16, 80) and kind in ("f32", "q8"))
def test_heads_of_every_size(kind: str, size: int) -> None:
    """Sizes that fill registers, groups of codes and blocks of the rotation, and such that do not."""
    rng = np.random.default_rng([size, *map(ord, kind)])
    run(attention(rng, kind, heads=1, kv_heads=1, head_dim=size), VARIANTS["native"])
    for op in ("load_keys", "store_keys"):
        run(turning(rng, kind, op, size), VARIANTS["native"])


@pytest.mark.parametrize("kind", ["bf16", "q8", "q4"])
def test_heads_of_a_group_that_do_not_share_registers(kind: str) -> None:
    """Eleven to a kv head: eight at once, then three."""
    rng = np.random.default_rng([*map(ord, kind)])
    run(attention(rng, kind, heads=22, kv_heads=2), VARIANTS["native"])


@pytest.mark.parametrize(("soft_cap", "bias"), [(2.0, "none"), (0.0, "alibi"), (2.0, "alibi"), (0.0, "scaled_alibi")])
def test_attention_caps_scores_and_takes_distance_off(soft_cap: float, bias: str) -> None:
    rng = np.random.default_rng([*map(ord, bias)])
    run(attention(rng, soft_cap=soft_cap, bias=bias, causal=1), VARIANTS["native"])


@pytest.mark.parametrize("window", [0, 1, 9, 33])
def test_a_row_of_an_encoder_sees_what_follows_it(window: int) -> None:
    rng = np.random.default_rng(window)
    run(attention(rng, causal=0, window=window), VARIANTS["native"])
