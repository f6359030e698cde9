"""pack_weights and matrices over experts: Before, and what stands in the graph after."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from llmc.compiler import ops
from llmc.compiler.spec import Experts, ModelSpec, example
from llmc.frontends.graph.build import build
from llmc.passes.matrices import matrices
from llmc.passes.pack_weights import pack_weights
from llmc.passes.pipeline import stages


def _spec(ffn: int) -> ModelSpec:
    spec = example()
    outer = {name: name for name in spec.tensors if name.split(".")[-1] not in ("gate", "up", "down")}
    named = {f"layers.{{layer}}.{name}" for name in ("router", "experts.gate", "experts.up", "experts.down")}
    return replace(spec, experts=Experts(4, 2, ffn, (0, 1)), tensors=outer
                   | {name: f"f.{name}" for name in named})  # fmt: skip


def _calls(module: tvm.IRModule) -> dict[str, dict[str, ops.Attr]]:
    """Name of an op -> the attributes of its last call."""
    found = [ops.match(binding.value) for block in module["step"].body.blocks for binding in block.bindings]
    return {match[0].name: match[2] for match in found if match}


@pytest.mark.parametrize(
    ("ffn", "format", "exact", "ways"),
    [
        (64, "q4", False, ("i8", "i8")),
        (64, "q4", True, ("packed", "packed")),
        (48, "q4", False, ("i8", "packed")),  # codes of a slice of 48 columns do not lie by themselves
        (48, "bf16", False, ("bf16", "bf16")),
        (48, "f32", False, ("packed", "packed")),
    ],
)
def test_experts_take_the_forms_of_linear_layers(ffn: int, format: str, exact: bool, ways: tuple[str, str]) -> None:
    calls = _calls(pack_weights(build(_spec(ffn)), lambda name: format, exact))
    into, out = (f"{way}_experts_{end}" for way, end in zip(ways, ("in", "out"), strict=True))
    assert calls[into] == {"format": format, "experts": 4, "width": ffn}
    assert calls[out] == {"format": format, "experts": 4, "width": 32}
    assert not {"experts_in", "experts_out"} & set(calls)


def test_gate_and_up_of_experts_are_one_op_when_all_passes_have_run() -> None:
    module = build(_spec(64))
    for stage in stages(lambda name: "q4"):
        module = stage.apply(module)
    calls = _calls(module)
    assert {"i8_experts_gated_i8", "i8_experts_out"} <= set(calls)
    assert not {"i8_experts_in", "gated_i8", "gated"} & set(calls)


def test_matrices_of_experts_are_a_choice_and_have_no_input_of_their_own() -> None:
    found = {matrix.sources[0]: matrix for matrix in matrices(build(_spec(64)))}
    assert found["layers.0.router"].input is not None
    assert (found["layers.0.experts.gate"].rows, found["layers.0.experts.gate"].columns) == (4 * 64, 32)
    assert found["layers.1.experts.down"].input is None
