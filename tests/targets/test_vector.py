"""Functions of sixteen lanes beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

import llmc.targets.target as targets
from llmc.targets.arguments import arguments
from llmc.targets.build import compile_kernels
from llmc.targets.vector import exp, exp_near, lanes

TARGETS = (targets.native(), targets.baseline(targets.native().arch))


def values(target: targets.Target, function: object, x: np.ndarray) -> np.ndarray:
    """function(x) by compiled code; x has a multiple of sixteen numbers."""
    import tvm

    with IRBuilder() as builder, T.prim_func():
        given, out = arguments(["float32", "float32"], [list(x.shape), list(x.shape)])
        with T.serial(0, x.size // 16) as step:
            T.buffer_store(out, function(given[lanes(step * 16)]), [lanes(step * 16)])  # type: ignore[operator]
    result = tvm.runtime.tensor(np.empty_like(x))
    compile_kernels({"kernel": builder.get()}, target)["kernel"](tvm.runtime.tensor(x), result)
    found: np.ndarray = result.numpy()
    return found


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(("function", "error"), [(exp, 2.4e-7), (exp_near, 1e-5)])
def test_exponentials(target: targets.Target, function: object, error: float) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([-rng.random(4000) * 87, -rng.random(4000), np.linspace(-2, 0, 4000)]).astype(np.float32)
    found = values(target, function, x)
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=error)
    least = values(target, function, np.repeat(np.array([-87, -1e30], np.float32), 8))
    np.testing.assert_array_equal(least, least[0])
    assert 0 < least[0] < 2e-38
    assert (values(target, function, np.zeros(16, np.float32)) == 1).all()
