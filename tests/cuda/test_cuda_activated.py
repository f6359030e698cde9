"""Linear layers on CUDA whose activation is made with them: the bits of the two kernels, in every launch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from llmc.compiler import meaning
from llmc.compiler.ops import OPS
from llmc.compiler.ops.narrowed import MULTIPLIED, after_linear
from llmc.compiler.ops.rounded import ENDING, LINEAR
from llmc.targets.cuda.lower import make_kernel
from llmc.targets.cuda.target import CUDA_TARGETS, CudaTarget

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
import cuda_threads
from kernel_cases import TOLERANCE, floats, packed

ATTRS: dict[str, dict[str, Any]] = {
    "activate": {"activation": "gelu_tanh"},
    "gated": {"activation": "silu"},
    "bounded_gated": {"activation": "silu", "limit": 0.5, "plus": 1.0},
}
MOST = 140  # rows: of a prefill, too


def run(op: str, target: CudaTarget, arrays: list[np.ndarray], attrs: dict[str, Any]) -> np.ndarray:
    """What the kernel gives, on poisoned outputs."""
    like = OPS[op].meaning(*arrays, **attrs)
    rows = tirx.Var("m", "int64")
    shapes = [[rows, arrays[0].shape[1]], *(list(each.shape) for each in arrays[1:]), [rows, like.shape[1]]]
    out = np.full_like(like, 77)
    cuda_threads.run(make_kernel(op, target, shapes, attrs), [*arrays, out])
    return out


@pytest.mark.parametrize("chip", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize("op", MULTIPLIED)
@pytest.mark.parametrize(("name", "width"), [("q4", 96), ("q4", 72), ("bf16", 96), ("q3h", 64), ("q4_k", 64)])
@pytest.mark.thorough_if(
    case=lambda name, width, op, chip: (
        (name, width, op) not in (("q4", 96, "gated"), ("q4", 72, "bounded_gated"), ("q4", 72, "activate"))
        and (name, op, chip) != ("bf16", "gated", "cuda:sm_90")
    )
)
def test_an_activation_has_the_bits_of_the_ops_apart(name: str, width: int, op: str, chip: str) -> None:
    """Of one multiprocessor's blocks, which take several tiles; halves of 72 outputs do not begin with a tile."""
    target = replace(CUDA_TARGETS[chip], multiprocessors=1)
    rng = np.random.default_rng([width, *map(ord, name + op)])
    x, weight = meaning.round_rows(floats(rng, MOST, 256)), packed(rng, name, width, 256)
    linear, attrs = {"format": name, "width": width}, ATTRS[op]
    plain = run(LINEAR, target, [x, weight], linear)
    np.testing.assert_allclose(
        plain, OPS[LINEAR].meaning(x, weight, **linear), rtol=0, atol=10 * TOLERANCE * np.abs(plain).max()
    )
    apart = run(op + ENDING, target, [plain], attrs)
    for rows in (slice(3, 4), slice(20, 25), slice(30, 70), slice(MOST)):
        joined = run(after_linear(LINEAR, op + ENDING), target, [x[rows].copy(), weight], linear | attrs)
        np.testing.assert_array_equal(joined, apart[rows], err_msg=str(rows))
