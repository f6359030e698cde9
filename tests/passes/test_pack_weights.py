"""pack_weights, lift_weights and drop_dead: Before and Expected."""

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.compiler import ops
from llmc.passes.lift_weights import TRANSFORM, bundle_weights, lift_weights
from llmc.passes.pack_weights import pack_weights
from llmc.passes.pipeline import drop_dead


@I.ir_module
class Tied:
    """A table that is embedding and head at once."""

    @R.function
    def step(ids: R.Tensor(("n",), "int32"), w: R.Tensor((48, 64), "float32")):
        R.func_attr({"num_input": 1})
        n = T.int64()
        with R.dataflow():
            x = R.call_dps_packed("llmc.embedding", (ids, w), R.Tensor((n, 64), "float32"))
            y = R.call_dps_packed("llmc.linear", (x, w), R.Tensor((n, 48), "float32"))
            R.output(y)
        return y


@I.ir_module
class TiedQ4:
    @R.function
    def step(ids: R.Tensor(("n",), "int32"), w: R.Tensor((48, 64), "float32")):
        R.func_attr({"num_input": 1})
        n = T.int64()
        with R.dataflow():
            p = R.call_dps_packed("llmc.pack", (w, R.str("q4")), R.Tensor((3, 160), "int32"))
            x = R.call_dps_packed(
                "llmc.packed_embedding", (ids, p, R.str("q4"), R.prim_value(64)), R.Tensor((n, 64), "float32")
            )
            parts = R.call_dps_packed(
                "llmc.quantize_rows", (x,),
                [R.Tensor((n, 16), "int32"), R.Tensor((n, 2), "float32"), R.Tensor((n, 6), "float32"),
                 R.Tensor((n, 6), "int32")],
            )  # fmt: skip
            codes = parts[0]
            scales = parts[1]
            sums = parts[2]
            y = R.call_dps_packed(
                "llmc.i8_linear", (codes, scales, sums, p, R.str("q4"), R.prim_value(48)), R.Tensor((n, 48), "float32")
            )
            R.output(y)
        return y


def test_a_tied_table_is_packed_once() -> None:
    tvm.ir.assert_structural_equal(pack_weights(Tied, lambda name: "q4"), TiedQ4)


def test_a_whole_offset_has_dots_begin_with_it() -> None:
    read = {"q4": 2, "q8": 3, "c4": 3}  # of quantize_rows' results: sums or starts
    for format, place in read.items():
        text = pack_weights(Tied, lambda name, format=format: format).script()
        assert f"[{place}]" in text, (format, text)
        assert f"[{5 - place}]" not in text


def test_the_format_is_chosen_by_the_weight_name() -> None:
    text = pack_weights(Tied, lambda name: {"w": "bf16"}[name]).script()
    assert "llmc.round_rows" in text
    assert "llmc.bf16_linear" in text


def _three_that_read_the_same() -> tvm.IRModule:
    """x times q, k and v."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 64), "float32"))
    weights = [relax.Var(name, relax.TensorType((32, 64), "float32")) for name in ("q", "k", "v")]
    with builder.function("step", [x, *weights]):
        with builder.dataflow():
            made = [ops.emit(builder, "linear", x, weight) for weight in weights]
            found = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(found)
    return builder.get()


def test_matrices_that_read_the_same_share_what_it_is_rounded_to() -> None:
    formats = {"q": "q4", "k": "q8", "v": "q4"}  # which read sums, and starts
    text = pack_weights(_three_that_read_the_same(), formats.__getitem__).script()
    assert (text.count("llmc.quantize_rows"), text.count("llmc.i8_linear")) == (1, 3)
    assert [text.count(f"[{part}]") for part in range(4)] == [1, 1, 1, 1]


def test_what_they_read_is_rotated_once_too() -> None:
    formats = {"q": "r4", "k": "q8", "v": "r8"}
    module = _three_that_read_the_same()
    plain, exact = (pack_weights(module, formats.__getitem__, exact).script() for exact in (False, True))
    counted = [plain.count(f'"llmc.{op}"') for op in ("quantize_rotated", "quantize_rows", "i8_linear")]
    assert counted == [1, 1, 3]
    assert [exact.count(f'"llmc.{op}"') for op in ("rotate_rows", "packed_linear")] == [1, 3]


def test_lifting_leaves_the_step_with_stored_weights_alone() -> None:
    lifted = lift_weights(TiedQ4)
    assert '"llmc.pack"' not in lifted["step"].script()
    assert '"llmc.pack"' in lifted[TRANSFORM].script()
    bundled = bundle_weights(lifted)
    assert [v.name_hint for v in bundled.functions] == ["step"]
    assert len(bundled["step"].params) == 2  # ids, and all weights as one tuple


def test_unread_bindings_are_dropped() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((4, 8), "float32")):
            n = T.int64()
            with R.dataflow():
                unread = R.call_dps_packed("llmc.linear", (x, w), R.Tensor((n, 4), "float32"))  # noqa: F841
                y = R.add(x, x)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((4, 8), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(drop_dead(Before), Expected)
