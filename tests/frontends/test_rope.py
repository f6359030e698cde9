"""Rope's frequencies against those of transformers, for every kind of scaling."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmc.compiler.spec import Position, Scaling, Window, example
from llmc.frontends.graph.rope import Rope, rope_of

SIZE, CONTEXT = 32, 512
FACTORS = {"short_factor": [1 + i / 10 for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}

CASES: list[tuple[Scaling, dict[str, Any]]] = [
    (
        Scaling("llama3", 8.0, 64, low=1.0, high=4.0),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    (
        Scaling("yarn", 8.0, 64, low=1.0, high=32.0, magnitude=0.1 * np.log(8.0) + 1),
        {"rope_type": "yarn", "factor": 8.0},
    ),
    (
        Scaling("yarn", 4.0, 128, low=2.0, high=16.0, magnitude=1.5, round_ends=False),
        {
            "rope_type": "yarn", "factor": 4.0, "beta_slow": 2.0, "beta_fast": 16.0, "attention_factor": 1.5,
            "truncate": False,
        },
    ),
    (
        Scaling(
            "longrope", 8.0, 64, magnitude=1.25,
            short=tuple(FACTORS["short_factor"]), long=tuple(FACTORS["long_factor"]),
        ),
        {"rope_type": "longrope", "factor": 8.0, "attention_factor": 1.25, **FACTORS},
    ),
]  # fmt: skip


def _reference(table: dict[str, Any], original: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    parameters = {**table, "rope_theta": 10000.0, "original_max_position_embeddings": original}
    config = LlamaConfig(
        hidden_size=4 * SIZE, num_attention_heads=4, head_dim=SIZE, max_position_embeddings=CONTEXT,
        rope_parameters=parameters,
    )  # fmt: skip
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[table["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)
    return frequencies.numpy(), magnitude


@pytest.mark.parametrize(("scaling", "table"), CASES)
def test_scaled_frequencies(scaling: Scaling, table: dict[str, Any]) -> None:
    rope = Rope(10000.0, 1.0, scaling)
    expected, magnitude = _reference(table, scaling.original_context, CONTEXT)
    np.testing.assert_allclose(rope.frequencies(SIZE, CONTEXT), expected, rtol=2e-6)
    assert rope.magnitude == pytest.approx(magnitude)
    assert not np.allclose(expected, Rope(10000.0, 1.0, None).frequencies(SIZE, CONTEXT), rtol=1e-3)


def test_dynamic_scaling_grows_with_the_context() -> None:
    scaling = Scaling("dynamic", 4.0, CONTEXT)
    plain = Rope(10000.0, 1.0, None).frequencies(SIZE, CONTEXT)
    np.testing.assert_array_equal(Rope(10000.0, 1.0, scaling).frequencies(SIZE, CONTEXT), plain)
    for longer in (CONTEXT + 1, 4 * CONTEXT):
        expected, magnitude = _reference({"rope_type": "dynamic", "factor": 4.0}, CONTEXT, longer)
        rope = Rope(10000.0, 1.0, scaling)
        np.testing.assert_allclose(rope.frequencies(SIZE, longer), expected, rtol=2e-6)
        assert rope.magnitude == magnitude


def test_backwards_turns_by_the_negative_angle() -> None:
    for scaling, _ in [(None, {}), *CASES]:
        forwards = Rope(10000.0, 1.0, scaling).frequencies(SIZE, CONTEXT)
        found = Rope(10000.0, 1.0, scaling, backwards=True).frequencies(SIZE, CONTEXT)
        np.testing.assert_array_equal(found, -forwards)


def test_longrope_within_the_original_context() -> None:
    scaling, table = CASES[-1]
    expected, _ = _reference(table, scaling.original_context, scaling.original_context)
    found = Rope(10000.0, 1.0, scaling).frequencies(SIZE, scaling.original_context)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_linear_factor() -> None:
    plain = Rope(10000.0, 1.0, None).frequencies(SIZE, CONTEXT)
    np.testing.assert_allclose(Rope(10000.0, 4.0, None).frequencies(SIZE, CONTEXT), plain / 4, rtol=1e-6)


def test_which_rope_a_layer_has() -> None:
    scaling = CASES[0][0]
    spec = dataclasses.replace(
        example(), window=Window(8, (1,), theta=100.0, factor=2.0, scaled=False), scaling=scaling
    )
    assert rope_of(spec, 0) == Rope(10000.0, 1.0, scaling)
    assert rope_of(spec, 1) == Rope(100.0, 2.0, None)
    plain = dataclasses.replace(spec, position=Position("rope", plain_layers=(0,)))
    assert rope_of(plain, 0) is None
    assert rope_of(plain, 1) == Rope(100.0, 2.0, None)
    assert rope_of(dataclasses.replace(spec, position=Position("alibi"), scaling=None), 0) is None
