"""lift_weights of a module with two functions: what both store is stored once, and both take the same list."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.compiler import ops
from llmc.compiler.formats import FORMATS
from llmc.passes.lift_weights import bundle_weights, lift_weights, stored_by_all
from llmc.passes.pack_weights import pack_weights

NAMES = ["table", "own", "scale"]
SHAPES = [(48, 32), (16, 32), (32,)]


@I.ir_module
class Two:
    """The table is for both, each has something of its own, and each has the same parameters."""

    @R.function
    def encode(
        ids: R.Tensor(("n",), "int32"),
        table: R.Tensor((48, 32), "float32"),
        own: R.Tensor((16, 32), "float32"),
        scale: R.Tensor((32,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        n = T.int64()
        with R.dataflow():
            x = R.call_dps_packed("llmc.embedding", (ids, table), R.Tensor((n, 32), "float32"))
            y = R.call_dps_packed("llmc.linear", (x, own), R.Tensor((n, 16), "float32"))
            R.output(y)
        return y

    @R.function
    def step(
        ids: R.Tensor(("n",), "int32"),
        table: R.Tensor((48, 32), "float32"),
        own: R.Tensor((16, 32), "float32"),
        scale: R.Tensor((32,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        n = T.int64()
        with R.dataflow():
            x = R.call_dps_packed("llmc.embedding", (ids, table), R.Tensor((n, 32), "float32"))
            y = R.add(x, scale)
            R.output(y)
        return y


class _Sources:
    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights

    def read(self, name: str) -> np.ndarray:
        return self.weights[name]

    def pack(self, format: str, names: tuple[str, ...]) -> np.ndarray:
        return FORMATS[format].pack(self.weights[names[0]])


def test_functions_share_one_list_of_weights() -> None:
    lifted = lift_weights(pack_weights(Two, lambda name: "f32"))
    stored = stored_by_all(lifted, NAMES)
    assert sorted(weight.name for weight in stored) == sorted(NAMES)
    bundled = bundle_weights(lifted)
    assert sorted(v.name_hint for v in bundled.functions) == ["encode", "step"]
    takes = {tuple(str(part) for part in f.params[-1].ty.fields) for f in bundled.functions.values()}
    assert len(takes) == 1
    assert all(len(f.params) == 2 for f in bundled.functions.values())

    random = np.random.default_rng(0)
    weights = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in zip(NAMES, SHAPES, strict=True)
    }
    ops.register_meanings()
    machine = relax.VirtualMachine(relax.build(bundled, tvm.target.Target("llvm")), tvm.cpu())
    bundle = [tvm.runtime.tensor(weight.compute(_Sources(weights))) for weight in stored]
    ids = np.array([5, 0, 47], np.int32)
    picked = weights["table"][ids]
    encoded = machine["encode"](tvm.runtime.tensor(ids), bundle).numpy()
    np.testing.assert_allclose(encoded, picked @ weights["own"].T, atol=1e-5)
    np.testing.assert_allclose(machine["step"](tvm.runtime.tensor(ids), bundle).numpy(), picked + weights["scale"])


def test_one_function_keeps_its_order() -> None:
    one = tvm.IRModule({"step": pack_weights(Two, lambda name: "f32")["step"]})
    lifted = lift_weights(one)
    fields = bundle_weights(lifted)["step"].params[-1].ty.fields
    stored = stored_by_all(lifted, NAMES)
    assert [tuple(int(size) for size in field.shape) for field in fields] == [weight.shape for weight in stored]
