"""fuse_activation: Before and Expected."""

from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.compiler import ops
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


def _experts(second: str = "ids", width: int = 64, more: bool = False) -> tvm.IRModule:
    """Gate and up of experts, the second by ids `second`; `more`: the result reads gate too."""
    builder = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    kinds = {
        "codes": ((n, 16), "int32"), "scales": ((n, 2), "float32"), "totals": ((n, 6), "int32"),
        "ids": ((n, 3), "int32"), "others": ((n, 3), "int32"), "gate": ((width // 16 * 5, 160), "int32"),
        "up": ((width // 16 * 5, 160), "int32"),
    }  # fmt: skip
    given = {name: relax.Var(name, relax.TensorType(shape, dtype)) for name, (shape, dtype) in kinds.items()}
    left = [given[name] for name in ("codes", "scales", "totals")]
    attrs = {"format": "q4", "experts": 5, "width": width}
    with builder.function("step", list(given.values())):
        with builder.dataflow():
            halves = [
                ops.emit(builder, "i8_experts_in", *left, given[ids], given[weight], **attrs)
                for ids, weight in (("ids", "gate"), (second, "up"))
            ]
            both = builder.emit(relax.op.concat(halves, axis=1))
            q = ops.emit(builder, "gated_i8", both, activation="silu")
            parts = [builder.emit(relax.TupleGetItem(q, place)) for place in range(4)]
            found = builder.emit_output(relax.Tuple([*parts, *halves[:1] * more]))
        builder.emit_func_output(found)
    return builder.get()


def _ops(module: tvm.IRModule) -> list[str]:
    matched = [ops.match(binding.value) for block in module["step"].body.blocks for binding in block.bindings]
    return [found[0].name for found in matched if found is not None]


def test_a_gate_joins_both_matrices_of_experts() -> None:
    fused = fuse_activation(_experts())
    assert _ops(fused) == ["i8_experts_gated_i8"]
    found = ops.match(fused["step"].body.blocks[0].bindings[0].value)
    assert found is not None
    assert [str(operand.name) for operand in found[1]] == ["codes", "scales", "totals", "ids", "gate", "up"]
    assert found[2] == {"format": "q4", "experts": 5, "width": 64, "activation": "silu"}


@pytest.mark.parametrize("case", [{"second": "others"}, {"width": 48}, {"more": True}])
def test_matrices_of_experts_stay_where_they_differ_or_others_read_them(case: dict[str, Any]) -> None:
    module = _experts(**case)
    tvm.ir.assert_structural_equal(fuse_activation(module), module)
