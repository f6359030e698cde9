"""Which models can go on with a text in which ways, by how they know where tokens stand."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from llmc.compiler.spec import Pooling, Scaling, Window, example
from llmc.compiler.spec.endless import endless_modes, turns

SPEC = example()
EVERY = tuple(range(SPEC.sizes.layers))
ALL, NO_SHIFT, AGAIN = ("sinks", "shift", "reevaluate"), ("sinks", "reevaluate"), ("reevaluate",)
GROWING = Scaling("llama3", 8.0, 64, queries=0.1)


def _position(**changes: Any) -> dict[str, Any]:
    return {"position": replace(SPEC.position, **changes)}


def _attention(**changes: Any) -> dict[str, Any]:
    return {"attention": replace(SPEC.attention, **changes)}


@pytest.mark.parametrize(
    ("changes", "modes", "turned"),
    [
        ({}, ALL, True),
        ({"scaling": replace(GROWING, queries=0.0)}, ALL, True),
        (_position(kind="alibi"), NO_SHIFT, False),
        (_position(kind="none"), NO_SHIFT, False),
        (_position(kind="learned"), AGAIN, False),
        (_position(kind="sinusoidal"), AGAIN, False),
        ({"scaling": GROWING}, AGAIN, False),
        ({"scaling": GROWING, **_position(plain_layers=EVERY)}, AGAIN, False),
        (_position(plain_layers=EVERY), NO_SHIFT, False),
        (_attention(qk_norm="head", qk_norm_place="after_rope"), AGAIN, False),
        (_attention(qk_norm="head"), ALL, True),
        ({"window": Window(16, EVERY[:1], 1e4)}, NO_SHIFT, True),
        ({"window": Window(16, EVERY, 1e4)}, NO_SHIFT, False),
        (_attention(causal=False), (), False),
        ({"pooling": Pooling("last")}, (), False),
    ],
)
def test_modes(changes: dict[str, Any], modes: tuple[str, ...], turned: bool) -> None:
    spec = copy.copy(SPEC)
    for name, value in changes.items():
        object.__setattr__(spec, name, value)  # not `replace`, which would want tensors that fit
    assert endless_modes(spec) == modes
    assert turns(spec) == turned
