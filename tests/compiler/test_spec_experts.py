"""The block `experts` of a spec: what holds together, which tensors it asks for, which layers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from llmc.compiler.errors import SpecError
from llmc.compiler.spec import Experts, Mlp, ModelSpec, Sizes, example, from_toml, tensor_shapes, to_toml
from llmc.compiler.spec.tensors import is_router, is_stacked

NAMES = ("router", "experts.gate", "experts.up", "experts.down")


def mixed(**changes: Any) -> ModelSpec:
    """The example with experts in its second layer; `changes` are blocks, or fields of experts."""
    spec = example()
    blocks = {name: value for name, value in changes.items() if name in ("sizes", "mlp")}
    fields = {name: value for name, value in changes.items() if name not in blocks}
    experts = Experts(**{"count": 6, "used": 2, "ffn": 32, "layers": (1,), **fields})
    named = {f"layers.{{layer}}.{name}": f"l{{layer}}.{name}" for name in NAMES}
    return replace(spec, experts=experts, tensors=spec.tensors | named, **blocks)


def test_round_trip_and_shapes() -> None:
    spec = mixed()
    assert from_toml(to_toml(spec)) == spec
    shapes = tensor_shapes(spec)
    assert shapes["layers.1.router"] == (6, 32)
    assert shapes["layers.1.experts.gate"] == shapes["layers.1.experts.up"] == (6 * 32, 32)
    assert shapes["layers.1.experts.down"] == (6 * 32, 32)
    assert shapes["layers.0.gate"] == (48, 32)
    assert "layers.1.gate" not in shapes
    assert "layers.0.router" not in shapes


def test_names_with_a_meaning() -> None:
    assert is_router("layers.3.router")
    assert is_router("layers.3.shared_gate")
    assert not is_router("layers.3.router_bias")
    assert not is_router("layers.3.shared.gate")
    assert is_stacked("layers.3.experts.up")
    assert not is_stacked("layers.3.shared.up")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"used": 7}, "experts.used = 7, wanted 1 to experts.count = 6"),
        ({"used": 0}, "experts.used = 0, wanted 1 to"),
        ({"ffn": 40}, "experts.ffn = 40, wanted a multiple of 16"),
        ({"ffn": 0}, "experts.ffn = 0, wanted a multiple of 16"),
        ({"sizes": Sizes(64, 40, 2, 48, 128)}, "sizes.hidden = 40, wanted a multiple of 16"),
        ({"layers": ()}, "experts.layers has no layer"),
        ({"layers": (1, 2)}, "experts.layers = (1, 2), wanted indices from 0 to 1"),
        ({"groups": 4}, "wanted a divisor of experts.count = 6"),
        ({"groups": 2, "groups_used": 3}, "no more used than there are"),
        ({"groups": 6, "used": 2}, "experts.used = 2, more than 1 groups have"),
        ({"mlp": Mlp("plain", "silu")}, "experts need mlp.kind = gated"),
        ({"mlp": Mlp("gated", "silu", bias=True)}, "mlp.bias = false"),
        ({"shared_gate": True}, "experts.shared_ffn is 0"),
        ({"count": 0}, "experts.count = 0 means no experts"),
        ({"count": 1}, "experts.count = 1, wanted a whole number from 2"),
        ({"scale": 0.0}, "experts.scale = 0.0, wanted a number from"),
        ({"routing": "hash"}, "experts.routing = 'hash', llmc knows: softmax"),
        ({"bias": True}, "tensors lacks layers.{layer}.router_bias"),
        ({"layers": (0, 1)}, "tensors has unused"),
        ({"routing": "sparse_mixer"}, "sparse_mixer and a tolerance above 0 go together"),
        ({"tolerance": 0.1}, "sparse_mixer and a tolerance above 0 go together"),
        ({"routing": "sparse_mixer", "tolerance": 0.1, "scale": 2.0}, "sparse_mixer needs groups = 1"),
        ({"biases": True}, "tensors lacks layers.{layer}.experts.gate_bias"),
        ({"product_bias": True}, "tensors lacks layers.{layer}.router_product_bias"),
    ],
)
def test_what_does_not_hold_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        mixed(**changes)
