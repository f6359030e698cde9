"""Every kernel against its NumPy meaning, on random shapes, for every kind of CPU this machine can run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.targets import target as targets
from llmc.targets.lower import KERNELS

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import CASES, run

FLAGS = targets.cpu_flags()
AVX2 = targets.native(frozenset(f for f in FLAGS if not f.startswith("avx512")))
AVX512 = targets.native(frozenset(f for f in FLAGS if f != "avx512_vnni"))
VARIANTS = {t.name: t for t in (targets.native(), targets.portable(targets.native().arch), AVX2, AVX512)}


def test_every_kernel_has_a_case() -> None:
    assert set(CASES) == set(KERNELS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", CASES)
def test_kernel_equals_its_meaning(op: str, variant: str) -> None:
    rng = np.random.default_rng([len(op), *map(ord, op)])
    for _ in range(8 if variant == targets.native().name else 3):
        run(CASES[op](rng), VARIANTS[variant])
