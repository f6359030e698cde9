"""fuse_linears: Before and Expected."""

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.passes.fuse_linears import fuse_linears


def test_outputs_side_by_side_become_one_linear() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), a: R.Tensor((4, 8), "float32"), b: R.Tensor((2, 8), "float32")):
            n = T.int64()
            with R.dataflow():
                p = R.call_dps_packed("llmc.linear", (x, a), R.Tensor((n, 4), "float32"))
                q = R.call_dps_packed("llmc.linear", (x, b), R.Tensor((n, 2), "float32"))
                y = R.concat((p, q), axis=1)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), a: R.Tensor((4, 8), "float32"), b: R.Tensor((2, 8), "float32")):
            n = T.int64()
            with R.dataflow():
                w = R.concat((a, b), axis=0)
                y = R.call_dps_packed("llmc.linear", (x, w), R.Tensor((n, 6), "float32"))
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(fuse_linears(Before, lambda name: "q8"), Expected)


def test_biases_are_joined_too() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(
            x: R.Tensor(("n", 8), "float32"), a: R.Tensor((4, 8), "float32"), b: R.Tensor((2, 8), "float32"),
            c: R.Tensor((4,), "float32"), d: R.Tensor((2,), "float32"),
        ):  # fmt: skip
            n = T.int64()
            with R.dataflow():
                p = R.call_dps_packed("llmc.linear", (x, a), R.Tensor((n, 4), "float32"))
                pc = R.add(p, c)
                q = R.call_dps_packed("llmc.linear", (x, b), R.Tensor((n, 2), "float32"))
                qd = R.add(q, d)
                y = R.concat((pc, qd), axis=1)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(
            x: R.Tensor(("n", 8), "float32"), a: R.Tensor((4, 8), "float32"), b: R.Tensor((2, 8), "float32"),
            c: R.Tensor((4,), "float32"), d: R.Tensor((2,), "float32"),
        ):  # fmt: skip
            n = T.int64()
            with R.dataflow():
                w = R.concat((a, b), axis=0)
                p = R.call_dps_packed("llmc.linear", (x, w), R.Tensor((n, 6), "float32"))
                bias = R.concat((c, d), axis=0)
                y = R.add(p, bias)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(fuse_linears(Before, lambda name: "q8"), Expected)


def test_different_inputs_stay_apart() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), z: R.Tensor(("n", 8), "float32"), a: R.Tensor((4, 8), "float32")):
            n = T.int64()
            with R.dataflow():
                p = R.call_dps_packed("llmc.linear", (x, a), R.Tensor((n, 4), "float32"))
                q = R.call_dps_packed("llmc.linear", (z, a), R.Tensor((n, 4), "float32"))
                y = R.concat((p, q), axis=1)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(fuse_linears(Before, lambda name: "q8"), Before)
