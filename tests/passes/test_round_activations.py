"""round_activations: Before and Expected."""

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.passes.round_activations import round_activations


@I.ir_module
class Before:
    """Two matrices in q4 that read the same x, and one in float32."""

    @R.function
    def step(
        x: R.Tensor(("n", 64), "float32"),
        p: R.Tensor((3, 160), "int32"),
        q: R.Tensor((3, 160), "int32"),
        w: R.Tensor((3, 64, 16), "float32"),
    ):
        n = T.int64()
        with R.dataflow():
            a = R.call_dps_packed(
                "llmc.packed_linear", (x, p, R.str("q4"), R.prim_value(48)), R.Tensor((n, 48), "float32")
            )
            b = R.call_dps_packed(
                "llmc.packed_linear", (x, q, R.str("q4"), R.prim_value(48)), R.Tensor((n, 48), "float32")
            )
            c = R.call_dps_packed(
                "llmc.packed_linear", (x, w, R.str("f32"), R.prim_value(48)), R.Tensor((n, 48), "float32")
            )
            R.output(a, b, c)
        return (a, b, c)


@I.ir_module
class Expected:
    @R.function
    def step(
        x: R.Tensor(("n", 64), "float32"),
        p: R.Tensor((3, 160), "int32"),
        q: R.Tensor((3, 160), "int32"),
        w: R.Tensor((3, 64, 16), "float32"),
    ):
        n = T.int64()
        with R.dataflow():
            r = R.call_dps_packed("llmc.round_rows", (x,), R.Tensor((n, 32), "int32"))
            a = R.call_dps_packed(
                "llmc.bf16_linear", (r, p, R.str("q4"), R.prim_value(48)), R.Tensor((n, 48), "float32")
            )
            b = R.call_dps_packed(
                "llmc.bf16_linear", (r, q, R.str("q4"), R.prim_value(48)), R.Tensor((n, 48), "float32")
            )
            c = R.call_dps_packed(
                "llmc.packed_linear", (x, w, R.str("f32"), R.prim_value(48)), R.Tensor((n, 48), "float32")
            )
            R.output(a, b, c)
        return (a, b, c)


def test_matrices_of_block_formats_read_rounded_rows() -> None:
    tvm.ir.assert_structural_equal(round_activations(Before), Expected)
