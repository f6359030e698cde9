"""The original in parts gives the bits of the original as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmc.compiler.driver.original import Original, runs_in_parts
from llmc.compiler.driver.probe import Probe
from llmc.frontends.source import open_model


def test_a_layer_at_a_time_computes_the_same(tiny_llama: Callable[..., Path]) -> None:
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 60, 37)]
    with open_model(tiny_llama()) as model:
        assert runs_in_parts(model.spec)
        seen: list[tuple[int, int]] = []
        original = Original(model, lambda done, total: seen.append((done, total)))
        got, inputs = original.run(ids)
        expected, _ = Probe(model).run(ids)
        again, _ = original.run(ids[:5])
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(again, expected[:5])
    assert inputs == []
    layers = model.spec.sizes.layers
    assert seen[: layers + 2] == [(n + 1, layers + 2) for n in range(layers + 2)]
