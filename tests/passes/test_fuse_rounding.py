"""Rounding to bfloat16 goes into the norm, activation or attention before it, and stays where others read that too."""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.spec import example
from llmc.frontends.graph.build import build
from llmc.passes.fuse_rounding import fuse_rounding
from llmc.passes.pipeline import stages


def step(format: str = "bf16") -> tvm.IRModule:
    module = build(example())
    for stage in stages(lambda name: format, exact=True):
        module = stage.apply(module)
    return module


def counted(module: tvm.IRModule) -> Counter[str]:
    """How often the step has each op."""
    bindings = [binding.value for block in module["step"].body.blocks for binding in block.bindings]
    return Counter(match[0].name for match in map(ops.match, bindings) if match is not None)


def test_norms_gates_and_attention_round_what_matrices_read() -> None:
    before, after = counted(step()), counted(fuse_rounding(step()))
    assert (before["round_rows"], after["round_rows"]) == (9, 0)
    assert (before["attention"], after["attention_bf16"]) == (2, 2)
    assert (before["rms_norm"], after["rms_norm_bf16"]) == (2, 2)
    assert (before["add_rms_norm"], after["add_rms_norm_bf16"]) == (3, 3)
    assert (before["gated"], after["gated_bf16"]) == (2, 2)
    assert not after["rms_norm"] + after["add_rms_norm"] + after["gated"]


def test_where_nothing_is_rounded_all_stays() -> None:
    assert counted(fuse_rounding(step("f32"))) == counted(step("f32"))


def test_what_others_read_too_stays() -> None:
    x, weight = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (3, 8)), ("w", (8,))))
    builder = relax.BlockBuilder()
    with builder.function("step", [x, weight]):
        with builder.dataflow():
            y = ops.emit(builder, "rms_norm", x, weight, eps=1e-5)
            pairs = ops.emit(builder, "round_rows", y)
            output = builder.emit_output(relax.Tuple([y, pairs]))
        builder.emit_func_output(output)
    assert counted(fuse_rounding(builder.get())) == {"rms_norm": 1, "round_rows": 1}


def test_odd_widths_stay() -> None:
    x, weight = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (3, 7)), ("w", (7,))))
    builder = relax.BlockBuilder()
    with builder.function("step", [x, weight]):
        with builder.dataflow():
            y = ops.emit(builder, "rms_norm", x, weight, eps=1e-5)
            output = builder.emit_output(ops.emit(builder, "round_rows", y))
        builder.emit_func_output(output)
    assert counted(fuse_rounding(builder.get())) == {"rms_norm": 1, "round_rows": 1}
