"""Specs with an encoder: its tensors, its layers in the pool, and settings that it cannot have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.compiler.errors import SpecError
from llmc.compiler.spec import (
    Encoder,
    Head,
    ModelSpec,
    Pooling,
    Position,
    Tokens,
    Window,
    Wiring,
    example,
    from_toml,
    pool_layers,
    tensor_shapes,
    to_toml,
)
from llmc.compiler.spec.sources import expand_sources
from llmc.compiler.spec.tensors import required_tensors

BUCKETS = Position("relative", buckets=8, distance=20)


def translator(**blocks: Any) -> ModelSpec:
    """The example with an encoder of three layers, other blocks on top."""
    spec = example()
    plain = {field: getattr(spec, field) for field in spec.__dataclass_fields__ if field not in ("name", "tensors")}
    parts = {**plain, "tokens": Tokens(None, (2,), False, end=2, start=0), "encoder": Encoder(3, 64), **blocks}
    names = required_tensors(SimpleNamespace(**parts))
    return ModelSpec(name="translator", tensors={name: name for name in names}, **parts)


def test_an_encoder_has_the_layers_of_the_model_and_no_more() -> None:
    spec = translator(position=BUCKETS)
    shapes = tensor_shapes(spec)
    assert from_toml(to_toml(spec)) == spec
    assert pool_layers(spec) == 3
    assert pool_layers(example()) == 2
    assert shapes["encoder.layers.2.gate"] == (64, 32)
    assert shapes["layers.1.gate"] == (48, 32)
    assert shapes["layers.1.cross_k"] == (16, 32)
    assert shapes["relative_bias"] == shapes["encoder.relative_bias"] == (8, 4)
    assert "layers.2.q" not in shapes
    assert "encoder.embedding" not in shapes
    assert not [name for name in shapes if name.startswith("encoder.") and ("cross" in name or "head" in name)]
    assert list(shapes)[0] == "embedding"
    assert not [name for name in tensor_shapes(example()) if "cross" in name or "encoder" in name]


def test_tables_of_its_own_and_in_every_layer() -> None:
    shapes = tensor_shapes(translator(position=replace(BUCKETS, per_layer=True), encoder=Encoder(1, 64, True)))
    assert shapes["encoder.embedding"] == (64, 32)
    assert shapes["encoder.layers.0.relative_bias"] == shapes["layers.1.relative_bias"] == (8, 4)
    assert "relative_bias" not in shapes
    assert tensor_shapes(translator(position=Position("learned")))["encoder.positions"] == (128, 32)


def test_sources_are_expanded_to_the_layers_of_each() -> None:
    found = expand_sources({"encoder.layers.{layer}.q": "e.{layer}.q", "layers.{layer}.q": "d.{layer}.q"}, 1, 2)
    assert {ours: source.name for ours, source in found.items()} == {
        "encoder.layers.0.q": "e.0.q", "encoder.layers.1.q": "e.1.q", "layers.0.q": "d.0.q",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"window": Window(8, (0,), 1e4)}, "window is not for models with an encoder"),
        ({"wiring": Wiring("parallel")}, "wiring.order = parallel, wanted sequential"),
        ({"head": Head(True, "hidden"), "pooling": Pooling("last")}, "head.kind = hidden, wanted logits"),
        ({"attention": replace(example().attention, soft_cap=9.0)}, "attention.soft_cap is not for models with an"),
        ({"tokens": Tokens(None, (2,), False)}, "tokens.start and a table [encoder] go together"),
        ({"tokens": Tokens(None, (2,), False, start=64)}, "tokens.start = 64, wanted an id from 0 to 63"),
        ({"tokens": Tokens(None, (2,), False, start=1, forced=(1, 70))}, "tokens.forced = 70, wanted an id"),
        ({"position": replace(BUCKETS, buckets=6)}, "position.buckets = 6, distance = 20, wanted a multiple of 4"),
        ({"position": BUCKETS, "attention": replace(example().attention, sinks=True)}, "needs attention.sinks = false"),
        ({"position": replace(BUCKETS, distance=4)}, "a distance of more than half as much"),
        ({"encoder": Encoder(0, 64)}, "encoder.layers = 0, wanted a whole number from 1"),
    ],
)
def test_what_does_not_go_with_an_encoder(blocks: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        translator(**blocks)
    assert message in str(caught.value)


def test_an_answer_without_an_encoder() -> None:
    for tokens in (Tokens(1, (2,), False, start=1), Tokens(1, (2,), False, forced=(1,))):
        with pytest.raises(SpecError, match=r"tokens.(start and|forced is for models with) a table \[encoder\]"):
            replace(example(), tokens=tokens)
