"""fuse_activation: Before and Expected."""

from collections import Counter
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.compiler import ops
from llmc.compiler.formats import FORMATS
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


def _experts(
    second: str = "ids", width: int = 64, more: bool = False, apart: bool = False, biases: tuple[str, ...] = ()
) -> tvm.IRModule:
    """Gate and up of experts, the second by ids `second`, each with its own parts of what was rounded to int8.

    `more`: the result reads gate too. `apart`: the second reads something else that was rounded. `biases`: ids of those
    of the first and of the second.
    """
    builder = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    kinds = {
        "x": ((n, 64), "float32"), "y": ((n, 64), "float32"), "ids": ((n, 3), "int32"), "others": ((n, 3), "int32"),
        "gate": ((width // 16 * 5, 160), "int32"), "up": ((width // 16 * 5, 160), "int32"),
        "bias": ((5 * width,), "float32"),
    }  # fmt: skip
    given = {name: relax.Var(name, relax.TensorType(shape, dtype)) for name, (shape, dtype) in kinds.items()}
    attrs = {"format": "q4", "experts": 5, "width": width}
    with builder.function("step", list(given.values())):
        with builder.dataflow():
            rounded = {name: ops.emit(builder, "quantize_rows", given[name]) for name in "xy"}
            halves = []
            for source, ids, weight in (("x", "ids", "gate"), ("y" if apart else "x", second, "up")):
                left = [builder.emit(relax.TupleGetItem(rounded[source], place)) for place in (0, 1, 2)]
                halves.append(ops.emit(builder, "i8_experts_in", *left, given[ids], given[weight], **attrs))
            for place, name in enumerate(biases):
                halves[place] = ops.emit(builder, "experts_bias", halves[place], given[name], given["bias"], experts=5)
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
    assert _ops(fused) == ["quantize_rows", "quantize_rows", "i8_experts_gated_i8"]
    calls = [ops.match(binding.value) for block in fused["step"].body.blocks for binding in block.bindings]
    ((_, operands, attrs),) = [call for call in calls if call is not None and call[0].name.startswith("i8_")]
    assert [str(operand.name) for operand in operands[3:]] == ["ids", "gate", "up"]
    assert attrs == {"format": "q4", "experts": 5, "width": 64, "activation": "silu"}


def test_what_is_added_to_both_joins_too() -> None:
    fused = fuse_activation(_experts(biases=("ids", "ids")))
    assert _ops(fused) == ["quantize_rows", "quantize_rows", "i8_experts_biased_gated_i8"]


@pytest.mark.parametrize(
    "case",
    [
        {"second": "others"}, {"width": 48}, {"more": True}, {"apart": True}, {"biases": ("ids",)},
        {"biases": ("ids", "others")},
    ],
)  # fmt: skip
def test_matrices_of_experts_stay_where_they_differ_or_others_read_them(case: dict[str, Any]) -> None:
    module = _experts(**case)
    tvm.ir.assert_structural_equal(fuse_activation(module), module)


def test_with_bfloat16_matrices_are_joined_that_kernels_join() -> None:
    asked = []

    def joined(format: str, columns: int, joins: bool) -> Counter[str]:
        x = relax.Var("x", relax.TensorType((3, columns // 2), "int32"))
        weight = relax.Var("w", relax.TensorType(FORMATS[format].packed_shape(128, columns), "int32"))
        builder = relax.BlockBuilder()
        with builder.function("step", [x, weight]):
            with builder.dataflow():
                y = ops.emit(builder, "bf16_linear", x, weight, format=format, width=128)
                output = builder.emit_output(ops.emit(builder, "gated_bf16", y, activation="silu"))
            builder.emit_func_output(output)
        module = fuse_activation(builder.get(), lambda *matrix: asked.append(matrix) or joins)
        bindings = module["step"].body.blocks[0].bindings
        return Counter(found[0].name for found in (ops.match(binding.value) for binding in bindings) if found)

    assert joined("q4", 64, True) == {"bf16_linear_gated_bf16": 1}
    assert joined("q4", 96, False) == {"bf16_linear": 1, "gated_bf16": 1}
    assert asked == [("q4", 64), ("q4", 96)]
