"""Every kernel against its NumPy meaning, on random shapes, for every kind of CPU this machine can run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.kv_pages import KINDS
from llmc.targets import target as targets
from llmc.targets.lower import KERNELS

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import BLOCK_FORMATS, CASES, attention, embedding_case, linear_case, run

FLAGS = targets.cpu_flags()
NEWER = {"avx512_vnni", "avx512vbmi", "avx_vnni"}


def _without(*flags: str) -> targets.Target:
    """This machine without some of its flags; a name that ends in * stands for all that begin so."""
    gone = {f for f in FLAGS for flag in flags if f == flag or (flag.endswith("*") and f.startswith(flag[:-1]))}
    return targets.native(FLAGS - gone)


VARIANTS = {
    "native": targets.native(),
    "no vbmi": _without("avx512vbmi"),
    "avx512": _without(*NEWER),
    "avx vnni": _without("avx512*"),
    "avx2": _without("avx512*", "avx_vnni"),
    "portable": targets.portable(targets.native().arch),
}


def test_every_kernel_has_a_case() -> None:
    assert set(CASES) == set(KERNELS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", CASES)
def test_kernel_equals_its_meaning(op: str, variant: str) -> None:
    rng = np.random.default_rng([len(op), *map(ord, op)])
    for _ in range(8 if variant == "native" else 2):
        run(CASES[op](rng), VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_every_block_format_equals_its_meaning(format: str, variant: str) -> None:
    rng = np.random.default_rng([*map(ord, format)])
    run(linear_case(rng, "i8_linear", format), VARIANTS[variant])
    if variant in ("native", "avx2"):
        run(embedding_case(rng, format), VARIANTS[variant])
        run(linear_case(rng, "packed_linear", format), VARIANTS[variant])


@pytest.mark.parametrize("variant", ["native", "avx2", "portable"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_its_meaning_over_every_kind_of_pages(kind: str, variant: str) -> None:
    rng = np.random.default_rng([*map(ord, kind)])
    for _ in range(3):
        run(attention(rng, kind), VARIANTS[variant])
