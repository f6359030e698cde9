"""Models on several devices compute what they do on one: by layer, by tensor, and both, structure by structure."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import (
    Convolution,
    Embedding,
    Encoder,
    Experts,
    Head,
    Latent,
    Mlp,
    ModelSpec,
    Norm,
    Pooling,
    Position,
    Sizes,
    Tokens,
    Window,
    Wiring,
)

sys.path.insert(0, str(Path(__file__).parent))
from on_devices import Devices, answer, spec_of, weights_of

PROMPT = [(7 * i * i + 3) % 60 for i in range(18)]
SOURCE = [(5 * i * i + 4) % 60 for i in range(21)]
STEPS = 4
FOUR = Sizes(vocab=64, hidden=32, layers=4, ffn=48, context=128)
_ROUTED = {"count": 5, "used": 2, "ffn": 16, "layers": (0, 1)}
_ENCODER = {
    "tokens": Tokens(None, (2,), False, end=2, start=0),
    "position": Position("relative", buckets=8, distance=20),
}
_BIASES = {"bias": True, "output_bias": True}
_LATENT = Latent(q_rank=20, kv_rank=16, plain_dim=16, rope_dim=8, value_dim=16)

# What the project promises, with layers for four stages.
PROMISED: dict[str, ModelSpec] = {
    "grouped queries": spec_of(8, 4, sizes=FOUR),
    "one kv head for all": spec_of(8, 1, sizes=FOUR),
    "experts": spec_of(8, 4, sizes=FOUR, experts=Experts(**_ROUTED)),
    "an encoder": spec_of(8, 4, encoder=Encoder(4, 64), sizes=FOUR, **_ENCODER),
}
# What is built differently somewhere.
OTHERS: dict[str, ModelSpec] = {
    "an encoder with tables of its own": spec_of(
        8, 1, _BIASES, encoder=Encoder(2, 40, own_embedding=True), mlp=Mlp("plain", "gelu_tanh", bias=True),
        **(_ENCODER | {"position": Position("learned")}),
    ),
    "an encoder, tables of each layer": spec_of(
        4, 4, encoder=Encoder(2, 40), **(_ENCODER | {"position": replace(_ENCODER["position"], per_layer=True)})
    ),
    "biases, learned positions, its own head": spec_of(
        6, 3, _BIASES, position=Position("learned"), head=Head(False, bias=True),
        mlp=Mlp("plain", "gelu_tanh", bias=True), norm=Norm("layer", 1e-5, bias=True),
    ),
    "alibi, both at once": spec_of(5, 5, position=Position("alibi"), wiring=Wiring("parallel")),
    "norms of heads, windows, soft caps": spec_of(
        8, 2, {"qk_norm": "head", "soft_cap": 5.0}, window=Window(5, (0,), 10000.0), head=Head(True, soft_cap=9.0),
        norm=Norm("rms", 1e-5, place="sandwich"), embedding=Embedding(scale=2.0),
    ),
    "a norm of all queries": spec_of(4, 2, {"qk_norm": "all"}, norm=Norm("rms", 1e-5, place="output")),
    "norms by head, their biases, sinks": spec_of(
        8, 4, {"qk_norm": "heads", "qk_norm_bias": True, "sinks": True}, norm=Norm("layer", 1e-5)
    ),
    "a gate of each number": spec_of(8, 4, {"gate": "each"}, position=Position("rope", rotary_dim=4)),
    "a gate of each head": spec_of(8, 4, {"gate": "head"}, wiring=Wiring("shared")),
    "a narrow embedding": spec_of(8, 4, embedding=Embedding(width=24)),
    "a slope of its own, no gate": spec_of(8, 4, mlp=Mlp("plain", "xielu"), norm=Norm("rms", 1e-5, place="sum")),
    "experts with biases and a shared one": spec_of(
        8, 4, experts=Experts(**_ROUTED, shared_ffn=40, shared_gate=True, biases=True, product_bias=True, bias=True)
    ),
    "vectors of a text": spec_of(
        8, 4, _BIASES | {"causal": False}, head=Head(True, kind="hidden"), pooling=Pooling("mean"),
        norm=Norm("layer", 1e-5, place="sum", bias=True, final=False, embedding=True), position=Position("learned"),
    ),
    "latents": spec_of(4, 4, {"kind": "mla", "head_dim": 24}, latent=_LATENT),
}  # fmt: skip
# What is divided by layer only: of four layers three have a convolution, each with two tensors of pages.
BY_LAYER: dict[str, ModelSpec] = {
    "convolutions": spec_of(
        4, 1, {"head_dim": 16}, sizes=Sizes(vocab=64, hidden=64, layers=4, ffn=48, context=128),
        convolution=Convolution(3, (0, 2, 3)),
    ),
}  # fmt: skip
STRUCTURES = PROMISED | OTHERS | BY_LAYER


@cache
def _whole(structure: str) -> np.ndarray:
    return _answer(structure, None)


def _answer(structure: str, devices: str | None, split: str | None = None, format: str = "") -> np.ndarray:
    spec = STRUCTURES[structure]
    model = Devices(spec, weights_of(spec), devices, split, format)
    return answer(model, PROMPT, STEPS, SOURCE if spec.encoder else None)


def _same(structure: str, devices: str, split: str | None = None) -> None:
    expected, found = _whole(structure), _answer(structure, devices, split)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("devices", ["0&1", "0&1&2&3", "0;1", "0;1;2;3", "0&1;2&3"])
@pytest.mark.parametrize("structure", PROMISED)
def test_on_two_and_four(structure: str, devices: str) -> None:
    _same(structure, devices)


@pytest.mark.parametrize("structure", OTHERS)
def test_every_structure_by_both(structure: str) -> None:
    _same(structure, "0&1;2&3")


@pytest.mark.parametrize(("devices", "split"), [("0;1", None), ("0;1;2;3", None), ("0;1", "3:1")])
@pytest.mark.parametrize("structure", BY_LAYER)
def test_by_layer(structure: str, devices: str, split: str | None) -> None:
    _same(structure, devices, split)


@pytest.mark.parametrize("devices", ["0&1", "0;1&2"])
def test_convolutions_are_not_shared(devices: str) -> None:
    spec = BY_LAYER["convolutions"]
    with pytest.raises(LlmcError, match=f"{devices}: short convolutions are not shared by devices; divide by layer"):
        Devices(spec, weights_of(spec), devices)


def test_a_compiled_part_is_like_any_compiled_model() -> None:
    structure = "experts with biases and a shared one"
    expected, found = _whole(structure), _answer(structure, "0&1", format="f32")
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("structure", ["grouped queries", "latents", "norms of heads, windows, soft caps"])
def test_keys_are_turned_on_every_device(structure: str) -> None:
    spec, found = STRUCTURES[structure], []
    for devices in (None, "0&1;2&3"):
        model = Devices(spec, weights_of(spec), devices)
        model.step(PROMPT, 0)
        still = model.step([5], len(PROMPT))
        model.turn(7)
        found.append((still, model.step([5], len(PROMPT))))
    (before, expected), (_, turned) = found
    most = 2e-4 * np.abs(expected).max()
    np.testing.assert_allclose(turned, expected, atol=most, rtol=0)
    assert np.abs(expected - before).max() > 10 * most


@pytest.mark.parametrize(("devices", "split"), [("0&1", "3:1"), ("0;1", "3:1"), ("0&1;2", "1:2:1")])
def test_unequal_shares(devices: str, split: str) -> None:
    _same("grouped queries", devices, split)


def test_fewer_experts_than_devices_are_refused_by_name() -> None:
    spec = STRUCTURES["experts"]
    with pytest.raises(LlmcError, match="6 devices cannot share 5 experts: each needs one at least"):
        Devices(spec, weights_of(spec), "0&1&2&3&4&5")
