"""fuse_activation: Before and Expected."""

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.passes.fuse_activation import fuse_activation


def test_a_gate_joins_the_matrix_that_it_alone_reads() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(
            codes: R.Tensor(("n", 16), "int32"), scales: R.Tensor(("n", 2), "float32"),
            totals: R.Tensor(("n", 6), "int32"), weight: R.Tensor((8, 160), "int32"),
        ):  # fmt: skip
            n = T.int64()
            with R.dataflow():
                y = R.call_dps_packed(
                    "llmc.i8_linear", (codes, scales, totals, weight, R.str("q4"), R.prim_value(128)),
                    R.Tensor((n, 128), "float32"),
                )  # fmt: skip
                q = R.call_dps_packed(
                    "llmc.gated_i8", (y, R.str("silu")),
                    [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                     R.Tensor((n, 6), "int32")],
                )  # fmt: skip
                found = q[0]
                R.output(found)
            return found

    @I.ir_module
    class Expected:
        @R.function
        def step(
            codes: R.Tensor(("n", 16), "int32"), scales: R.Tensor(("n", 2), "float32"),
            totals: R.Tensor(("n", 6), "int32"), weight: R.Tensor((8, 160), "int32"),
        ):  # fmt: skip
            n = T.int64()
            with R.dataflow():
                q = R.call_dps_packed(
                    "llmc.i8_linear_gated_i8",
                    (codes, scales, totals, weight, R.str("q4"), R.prim_value(128), R.str("silu")),
                    [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                     R.Tensor((n, 6), "int32")],
                )  # fmt: skip
                found = q[0]
                R.output(found)
            return found

    tvm.ir.assert_structural_equal(fuse_activation(Before), Expected)


def test_a_matrix_that_others_read_too_stays() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(
            codes: R.Tensor(("n", 16), "int32"), scales: R.Tensor(("n", 2), "float32"),
            totals: R.Tensor(("n", 6), "int32"), weight: R.Tensor((4, 160), "int32"),
        ):  # fmt: skip
            n = T.int64()
            with R.dataflow():
                y = R.call_dps_packed(
                    "llmc.i8_linear", (codes, scales, totals, weight, R.str("q4"), R.prim_value(64)),
                    R.Tensor((n, 64), "float32"),
                )  # fmt: skip
                q = R.call_dps_packed(
                    "llmc.activate_i8", (y, R.str("silu")),
                    [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                     R.Tensor((n, 6), "int32")],
                )  # fmt: skip
                found = q[0]
                R.output(found, y)
            return (found, y)

    tvm.ir.assert_structural_equal(fuse_activation(Before), Before)
