"""fuse_quantize: Before and Expected."""

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.passes.fuse_quantize import fuse_quantize


def test_a_norm_gives_int8_at_once() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 64), "float32"), w: R.Tensor((64,), "float32")):
            n = T.int64()
            with R.dataflow():
                y = R.call_dps_packed(
                    "llmc.rms_norm", (x, w, R.prim_value(T.float64(1e-5))), R.Tensor((n, 64), "float32")
                )
                parts = R.call_dps_packed(
                    "llmc.quantize_rows", (y,),
                    [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                     R.Tensor((n, 6), "int32")],
                )  # fmt: skip
                codes = parts[0]
                scales = parts[1]
                sums = parts[2]
                z = R.concat((scales, sums), axis=1)
                R.output(codes, z)
            return (codes, z)

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("n", 64), "float32"), w: R.Tensor((64,), "float32")):
            n = T.int64()
            with R.dataflow():
                y = R.call_dps_packed(
                    "llmc.rms_norm_i8", (x, w, R.prim_value(T.float64(1e-5))),
                    [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                     R.Tensor((n, 6), "int32")],
                )  # fmt: skip
                codes = y[0]
                scales = y[1]
                sums = y[2]
                z = R.concat((scales, sums), axis=1)
                R.output(codes, z)
            return (codes, z)

    tvm.ir.assert_structural_equal(fuse_quantize(Before), Expected)


def test_a_sum_lives_on_beside_its_norm_in_int8() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 64), "float32"), r: R.Tensor(("n", 64), "float32"), w: R.Tensor((64,), "float32")):
            n = T.int64()
            with R.dataflow():
                both = R.call_dps_packed(
                    "llmc.add_rms_norm", (x, r, w, R.prim_value(T.float64(1e-5))),
                    [R.Tensor((n, 64), "float32"), R.Tensor((n, 64), "float32")],
                )  # fmt: skip
                total = both[0]
                y = both[1]
                parts = R.call_dps_packed(
                    "llmc.quantize_rows", (y,),
                    [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                     R.Tensor((n, 6), "int32")],
                )  # fmt: skip
                scales = parts[1]
                z = R.concat((total, scales), axis=1)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("n", 64), "float32"), r: R.Tensor(("n", 64), "float32"), w: R.Tensor((64,), "float32")):
            n = T.int64()
            with R.dataflow():
                both = R.call_dps_packed(
                    "llmc.add_rms_norm_i8", (x, r, w, R.prim_value(T.float64(1e-5))),
                    [
                        R.Tensor((n, 64), "float32"), R.Tensor((n, 16), "int32"),
                        R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"), R.Tensor((n, 6), "int32"),
                    ],
                )  # fmt: skip
                total = both[0]
                scales = both[2]
                z = R.concat((total, scales), axis=1)
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(fuse_quantize(Before), Expected)


def test_what_is_read_as_floats_too_or_would_be_padded_stays() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 128), "float32"), z: R.Tensor(("n", 100), "float32")):
            n = T.int64()
            with R.dataflow():
                y = R.call_dps_packed("llmc.gated", (x, R.str("silu")), R.Tensor((n, 64), "float32"))
                parts = R.call_dps_packed(
                    "llmc.quantize_rows", (y,),
                    [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                     R.Tensor((n, 6), "int32")],
                )  # fmt: skip
                scales = parts[1]
                short = R.call_dps_packed("llmc.activate", (z, R.str("silu")), R.Tensor((n, 100), "float32"))
                padded = R.call_dps_packed(
                    "llmc.quantize_rows", (short,),
                    [R.Tensor((n, 32), "int32"), R.Tensor((n, 4), "float32"), R.Tensor((n, 12), "float32"),
                     R.Tensor((n, 12), "int32")],
                )  # fmt: skip
                others = padded[1]
                all_of_it = R.concat((y, scales, others), axis=1)
                R.output(all_of_it)
            return all_of_it

    tvm.ir.assert_structural_equal(fuse_quantize(Before), Before)
