"""pack_weights and matrices over the matrices of heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.spec import Attention, Latent, ModelSpec, example
from llmc.frontends.graph.build import build
from llmc.passes.matrices import matrices
from llmc.passes.pack_weights import pack_weights

_NAMES = ("q_plain", "q_rope", "kv_down", "kv_down_norm", "k_rope", "k_up", "v_up")


def _spec(plain: int, rank: int, rope: int) -> ModelSpec:
    spec = example()
    size = plain + rope
    outer = {name: name for name in spec.tensors if name.split(".")[-1] not in ("q", "k", "v")}
    named = {f"layers.{{layer}}.{name}": f"l{{layer}}.{name}" for name in _NAMES}
    return replace(
        spec, attention=Attention("mla", 4, 4, size, 1 / math.sqrt(size)), latent=Latent(0, rank, plain, rope, 16),
        tensors=outer | named,
    )  # fmt: skip


def _multiplied(module: tvm.IRModule, prefix: str) -> dict[str, tuple[str, dict[str, ops.Attr]]]:
    """Weight of the first layer's head matrices -> the op and the attributes it is multiplied by."""
    bound = {binding.var: binding.value for block in module["step"].body.blocks for binding in block.bindings}
    found = {}
    for match in filter(None, map(ops.match, bound.values())):
        op, operands, attrs = match
        if op.name.endswith("head_linear"):
            weight = operands[-1]
            while isinstance(bound.get(weight), relax.Call):
                weight = ops.match(bound[weight])[1][0]
            found[weight.name.removeprefix(prefix)] = op.name, attrs
    return found


@pytest.mark.parametrize(
    ("sizes", "format", "exact", "ways"),
    [
        ((64, 64, 64), "q4", False, ("i8", "i8")),
        ((64, 64, 64), "q4", True, ("packed", "packed")),
        ((64, 64, 8), "q4", False, ("i8", "packed")),  # heads of 72 columns: their blocks of 32 would be shared
        ((16, 64, 64), "q4", False, ("packed", "i8")),
        ((16, 32, 8), "bf16", False, ("bf16", "bf16")),
        ((16, 32, 8), "f32", False, ("packed", "packed")),
    ],
)
def test_matrices_of_heads_take_the_forms_of_linear_layers(
    sizes: tuple[int, int, int], format: str, exact: bool, ways: tuple[str, str]
) -> None:
    plain, rank, _ = sizes
    calls = _multiplied(pack_weights(build(_spec(*sizes)), lambda name: format, exact), "layers.0.")
    common = {"format": format, "heads": 4}
    assert calls["k_up"] == (f"{ways[0]}_head_linear", common | {"columns": plain, "width": 4 * rank})
    assert calls["v_up"] == (f"{ways[1]}_head_linear", common | {"columns": rank, "width": 4 * 16})


def test_matrices_of_heads_are_a_choice_and_have_no_input_of_their_own() -> None:
    found = {matrix.sources[0]: matrix for matrix in matrices(build(_spec(16, 32, 8)))}
    assert (found["layers.0.k_up"].rows, found["layers.0.k_up"].columns) == (4 * 32, 16)
    assert found["layers.1.v_up"].input is None
    assert found["layers.1.kv_down"].input is not None
