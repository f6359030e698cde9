"""The block `latent` of a spec: what holds together, which tensors it asks for, what a token takes in the cache."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from llmc.compiler.errors import SpecError
from llmc.compiler.spec import (
    Attention,
    Latent,
    ModelSpec,
    Position,
    cached_heads,
    example,
    from_toml,
    tensor_shapes,
    to_toml,
)

NAMES = ("q_down", "q_down_norm", "q_plain", "q_rope", "kv_down", "kv_down_norm", "k_rope", "k_up", "v_up")


def latent(**changes: Any) -> ModelSpec:
    """The example with latent attention; `changes` are fields of latent and attention, or blocks."""
    spec = example()
    blocks = {name: value for name, value in changes.items() if name == "position"}
    sizes = {"q_rank": 24, "kv_rank": 32, "plain_dim": 16, "rope_dim": 6, "value_dim": 48}
    sizes |= {name: value for name, value in changes.items() if name in sizes}
    more = {name: value for name, value in changes.items() if name not in sizes and name not in blocks}
    heads = {"kind": "mla", "heads": 4, "kv_heads": 4, "head_dim": 22, "scale": 1 / math.sqrt(22)} | more
    outer = {name: name for name in spec.tensors if name.split(".")[-1] not in ("q", "k", "v")}
    named = {f"layers.{{layer}}.{name}": f"l{{layer}}.{name}" for name in NAMES}
    return replace(spec, attention=Attention(**heads), latent=Latent(**sizes), tensors=outer | named, **blocks)


def test_round_trip_and_shapes() -> None:
    spec = latent()
    assert from_toml(to_toml(spec)) == spec
    found = tensor_shapes(spec)
    shapes = {name.removeprefix("layers.1."): shape for name, shape in found.items() if name.startswith("layers.1.")}
    assert {name: shapes[name] for name in (*NAMES, "o")} == {
        "q_down": (24, 32), "q_down_norm": (24,), "q_plain": (4 * 16, 24), "q_rope": (4 * 6, 24),
        "kv_down": (32, 32), "kv_down_norm": (32,), "k_rope": (6, 32), "k_up": (4 * 32, 16), "v_up": (4 * 48, 32),
        "o": (32, 4 * 48),
    }  # fmt: skip
    assert not {"q", "k", "v"} & set(shapes)


def test_the_cache_has_one_key_for_all_heads() -> None:
    assert cached_heads(latent()) == (1, 32 + 6)
    assert cached_heads(example()) == (2, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_rank": 24}, "latent.kv_rank = 24, wanted a multiple of 16"),
        ({"value_dim": 0}, "latent.value_dim = 0, wanted a multiple of 16"),
        ({"plain_dim": 24}, "latent.plain_dim = 24, wanted a multiple of 16"),
        ({"rope_dim": 0, "head_dim": 16}, "latent.rope_dim = 0, wanted an even number above 0"),
        ({"rope_dim": 5, "head_dim": 21}, "latent.rope_dim = 5, wanted an even number above 0"),
        ({"head_dim": 24}, "attention.head_dim = 24, wanted latent.plain_dim + rope_dim"),
        ({"kv_heads": 2}, "attention.kv_heads = 2, wanted attention.heads"),
        ({"qk_norm": "head"}, "attention.qk_norm is not for attention.kind = mla"),
        ({"clip": 2.0}, "attention.clip is not for attention.kind = mla"),
        ({"position": Position("rope", rotary_dim=6)}, "position.rotary_dim is not for attention.kind = mla"),
        ({"position": Position("alibi")}, "position.kind = alibi is not for attention.kind = mla"),
        ({"kind": "gqa"}, "attention.kind = gqa, but a table [latent] is given"),
        ({"q_rank": 0}, "tensors has unused 'layers.{layer}.q_down'"),
        ({"bias": True}, "tensors lacks layers.{layer}.q_down_bias"),
    ],
)
def test_what_does_not_hold_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        latent(**changes)
