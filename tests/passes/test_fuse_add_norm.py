"""fuse_add_norm: Before and Expected."""

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.passes.fuse_add_norm import fuse_add_norm


def test_sum_and_its_norm_become_one_op_and_the_sum_lives_on() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), r: R.Tensor(("n", 8), "float32"), w: R.Tensor((8,), "float32")):
            n = T.int64()
            with R.dataflow():
                total = R.add(x, r)
                y = R.call_dps_packed(
                    "llmc.rms_norm", (total, w, R.prim_value(T.float64(1e-5))), R.Tensor((n, 8), "float32")
                )
                z = R.add(total, y)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), r: R.Tensor(("n", 8), "float32"), w: R.Tensor((8,), "float32")):
            n = T.int64()
            with R.dataflow():
                both = R.call_dps_packed(
                    "llmc.add_rms_norm", (x, r, w, R.prim_value(T.float64(1e-5))),
                    [R.Tensor((n, 8), "float32"), R.Tensor((n, 8), "float32")],
                )  # fmt: skip
                total = both[0]
                y = both[1]
                z = R.add(total, y)
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(fuse_add_norm(Before), Expected)


def test_a_layer_norm_takes_its_bias_along() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(
            x: R.Tensor(("n", 8), "float32"), r: R.Tensor(("n", 8), "float32"),
            w: R.Tensor((8,), "float32"), b: R.Tensor((8,), "float32"),
        ):  # fmt: skip
            n = T.int64()
            with R.dataflow():
                total = R.add(x, r)
                y = R.call_dps_packed(
                    "llmc.layer_norm", (total, w, b, R.prim_value(T.float64(1e-5))), R.Tensor((n, 8), "float32")
                )
                z = R.add(total, y)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def step(
            x: R.Tensor(("n", 8), "float32"), r: R.Tensor(("n", 8), "float32"),
            w: R.Tensor((8,), "float32"), b: R.Tensor((8,), "float32"),
        ):  # fmt: skip
            n = T.int64()
            with R.dataflow():
                both = R.call_dps_packed(
                    "llmc.add_layer_norm", (x, r, w, b, R.prim_value(T.float64(1e-5))),
                    [R.Tensor((n, 8), "float32"), R.Tensor((n, 8), "float32")],
                )  # fmt: skip
                total = both[0]
                y = both[1]
                z = R.add(total, y)
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(fuse_add_norm(Before), Expected)


def test_of_two_norms_of_one_sum_the_second_reads_it() -> None:
    """A layer whose attention and MLP both read the old sum, each through a norm of its own."""

    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), r: R.Tensor(("n", 8), "float32"), w: R.Tensor((8,), "float32")):
            n = T.int64()
            with R.dataflow():
                total = R.add(x, r)
                y = R.call_dps_packed(
                    "llmc.rms_norm", (total, w, R.prim_value(T.float64(1e-5))), R.Tensor((n, 8), "float32")
                )
                z = R.call_dps_packed(
                    "llmc.rms_norm", (total, w, R.prim_value(T.float64(1e-6))), R.Tensor((n, 8), "float32")
                )
                both = R.add(y, z)
                R.output(both)
            return both

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), r: R.Tensor(("n", 8), "float32"), w: R.Tensor((8,), "float32")):
            n = T.int64()
            with R.dataflow():
                fused = R.call_dps_packed(
                    "llmc.add_rms_norm", (x, r, w, R.prim_value(T.float64(1e-5))),
                    [R.Tensor((n, 8), "float32"), R.Tensor((n, 8), "float32")],
                )  # fmt: skip
                total = fused[0]
                y = fused[1]
                z = R.call_dps_packed(
                    "llmc.rms_norm", (total, w, R.prim_value(T.float64(1e-6))), R.Tensor((n, 8), "float32")
                )
                both = R.add(y, z)
                R.output(both)
            return both

    tvm.ir.assert_structural_equal(fuse_add_norm(Before), Expected)


def test_a_bias_is_not_a_residual() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), b: R.Tensor((8,), "float32"), w: R.Tensor((8,), "float32")):
            n = T.int64()
            with R.dataflow():
                total = R.add(x, b)
                y = R.call_dps_packed(
                    "llmc.rms_norm", (total, w, R.prim_value(T.float64(1e-5))), R.Tensor((n, 8), "float32")
                )
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(fuse_add_norm(Before), Before)
