"""pack_weights with rotated formats: what is multiplied with them is rotated, and rows of tables are rotated back."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.passes.fuse_activation import fuse_activation
from llmc.passes.fuse_quantize import fuse_quantize
from llmc.passes.pack_weights import pack_weights


def _tied(columns: int) -> tvm.IRModule:
    """A table of 48 rows that is embedding and head at once."""
    builder = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType((3,), "int32"))
    table = relax.Var("w", relax.TensorType((48, columns), "float32"))
    with builder.function("step", [ids, table]):
        with builder.dataflow():
            x = ops.emit(builder, "embedding", ids, table)
            found = builder.emit_output(ops.emit(builder, "linear", x, table))
        builder.emit_func_output(found)
    return builder.get()


def _result(module: tvm.IRModule, arrays: list[np.ndarray]) -> np.ndarray:
    """What a module gives by the NumPy meanings of its ops."""
    ops.register_meanings()
    machine = relax.VirtualMachine(relax.build(module, tvm.target.Target("llvm")), tvm.cpu())
    return machine["step"](*(tvm.runtime.tensor(array) for array in arrays)).numpy()


def _ops(module: tvm.IRModule) -> list[str]:
    return re.findall(r"llmc\.(\w+)", module["step"].script())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("columns", [64, 100])
def test_a_tied_table_means_what_it_did(columns: int, exact: bool) -> None:
    module = pack_weights(_tied(columns), lambda name: "r8", exact)
    head = ["rotate_rows", "packed_linear"] if exact else ["quantize_rotated", "i8_linear"]
    assert _ops(module) == ["pack", "packed_embedding", "rotate_rows", *head]
    rng = np.random.default_rng(columns)
    ids, table = np.array([5, 0, 47], np.int32), rng.standard_normal((48, columns)).astype(np.float32)
    found = _result(module, [ids, table])
    wanted = table[ids] @ table.T
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


def test_a_norm_a_gate_and_a_linear_layer_are_fused_with_rotated_rows() -> None:
    builder = relax.BlockBuilder()
    given = {"x": (3, 64), "norm": (64,), "up": (128, 64), "down": (64, 64)}
    x, norm, up, down = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in given.items())
    with builder.function("step", [x, norm, up, down]):
        with builder.dataflow():
            y = ops.emit(builder, "rms_norm", x, norm, eps=1e-5)
            gated = ops.emit(builder, "gated", ops.emit(builder, "linear", y, up), activation="silu")
            found = builder.emit_output(ops.emit(builder, "linear", gated, down))
        builder.emit_func_output(found)
    module = fuse_activation(fuse_quantize(pack_weights(builder.get(), {"up": "q8", "down": "r8"}.__getitem__)))
    multiplied = [op for op in _ops(module) if op != "pack"]
    assert multiplied == ["rms_norm_i8", "i8_linear_gated_rotated_i8", "i8_linear"]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in given.values()]
    wanted = _result(builder.get(), arrays)
    assert np.abs(_result(module, arrays) - wanted).max() < 0.03 * np.abs(wanted).max()


def test_slices_that_would_cut_what_is_rotated_together_are_refused_by_name() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 80), "float32"))
    weight = relax.Var("k_up", relax.TensorType((64, 40), "float32"))
    with builder.function("step", [x, weight]):
        with builder.dataflow():
            found = builder.emit_output(ops.emit(builder, "head_linear", x, weight, heads=2))
        builder.emit_func_output(found)
    with pytest.raises(LlmcError, match="(?s)k_up: multiplied with 40 and 40 columns, so not in r4.*--recipe"):
        pack_weights(builder.get(), lambda name: "r4")
