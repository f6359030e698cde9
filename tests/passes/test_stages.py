"""The whole pipeline on a small random model: after every stage it still runs, and still computes the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from llmc.compiler import ops, pipeline
from llmc.compiler.evaluate import stored_weights
from llmc.compiler.spec import example, tensor_shapes
from llmc.frontends.graph.build import build
from llmc.passes.lift_weights import TRANSFORM, bundle_weights
from llmc.passes.pipeline import stages
from llmc.targets import target as targets
from llmc.targets.build import compile_module
from llmc.targets.lower import lower

sys.path.insert(0, str(Path(__file__).parent))
from on_devices import Arrays

pytestmark = pytest.mark.usefixtures("plain_code")

SPEC = example()
ROWS = 20


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: (0.1 * rng.standard_normal(s)).astype(np.float32) for n, s in tensor_shapes(SPEC).items()}


def _inputs() -> list[Any]:
    rng = np.random.default_rng(1)
    places = np.arange(ROWS, dtype=np.int32)
    index = [
        rng.integers(0, SPEC.sizes.vocab, ROWS).astype(np.int32), places, np.zeros(ROWS, np.int32), places,
        np.zeros((1, 2), np.int32), np.array([0, 2], np.int32), np.array([2, 0], np.int32),
        np.array([ROWS - 1, 3], np.int32),
    ]  # fmt: skip
    page = (3, 2, SPEC.attention.kv_heads, SPEC.attention.head_dim * 16)
    kv = [tvm.runtime.tensor(np.zeros(page, np.float32)) for _ in range(SPEC.sizes.layers)]
    return [*map(tvm.runtime.tensor, index), kv]


def _run(executable: Any, weights: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    logits, best, *_ = relax.VirtualMachine(executable, tvm.cpu())["step"](*_inputs(), *weights)
    return logits.numpy(), best.numpy()


def _by_meaning(module: tvm.IRModule, weights: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    ops.register_meanings()
    return _run(relax.build(module, tvm.target.Target("llvm")), weights)


# How far each format moves these logits (about 0.3 in size) from float32; a wrong layout moves them by their own size.
FORMAT_ERROR = {"f32": 1e-6, "bf16": 2e-3, "q8": 6e-3, "q4": 5e-2, "q3h": 1e-1, "c3h": 1e-1, "mixed": 5e-2}


def _choose(format: str) -> Callable[[str], str]:
    """One format for all; "mixed" gives the parts of q/k/v different ones, so that they stay apart."""
    return lambda name: format if format != "mixed" else "q4" if name.endswith(("v", "up")) else "q8"


@pytest.mark.thorough_if(case=lambda format: format != "mixed")
@pytest.mark.parametrize("format", FORMAT_ERROR)
def test_every_stage_computes_the_same(format: str) -> None:
    module, weights = build(SPEC), _weights()
    plain = [tvm.runtime.tensor(w) for w in weights.values()]
    expected, _ = _by_meaning(module, plain)
    before = expected
    for stage in stages(_choose(format)):
        module = stage.apply(module)
        if stage.name != "lift_weights":
            logits, _ = _by_meaning(module, plain)
            tolerance = FORMAT_ERROR[format] if stage.name == "pack_weights" else 1e-6
            np.testing.assert_allclose(logits, before, atol=tolerance, err_msg=stage.name)
            before = logits
    stored = [w.compute(Arrays(weights)) for w in stored_weights(module[TRANSFORM], list(weights))]
    bundle = [[tvm.runtime.tensor(w) for w in stored]]
    step = bundle_weights(module)
    packed, best = _by_meaning(step, bundle)
    np.testing.assert_allclose(packed, expected, atol=FORMAT_ERROR[format])
    for target in (targets.native(), targets.baseline(targets.native().arch)):
        logits, got = _run(compile_module(lower(step, target), target), bundle)
        # Sums in another order: an activation that lies between two int8 codes may take the other one.
        np.testing.assert_allclose(logits, packed, atol=1e-5, err_msg=target.name)
        np.testing.assert_array_equal(got, best)


def test_dump_writes_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_DUMP", str(tmp_path / "dump"))
    pipeline.run(stages(lambda name: "q4"), build(SPEC))
    names = [path.name for path in sorted((tmp_path / "dump").iterdir())]
    expected = ["frontend", *(stage.name for stage in stages(lambda name: "q4"))]
    assert names == [f"{i:02d}_{name}.py" for i, name in enumerate(expected)]
    assert (tmp_path / "dump" / "01_drop_dead.py").read_text() == "# drop_dead: unchanged\n"
    text = {path.name[3:-3]: path.read_text() for path in (tmp_path / "dump").iterdir()}
    assert "llmc.add_rms_norm" not in text["fuse_linears"]
    assert "llmc.add_rms_norm" in text["fuse_add_norm"]
    assert "llmc.i8_linear" in text["pack_weights"]
    assert "def step_transform_params" in text["lift_weights"]
