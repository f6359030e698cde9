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
        (got, squares), (short, _) = original.run([ids, ids[:5]])
        probe = Probe(model)
        expected, inputs = probe.run(ids)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(short, expected[:5])
    read = [matrix for matrix in probe.matrices if matrix.input is not None]
    assert set(squares) == {name for matrix in read for name in matrix.sources}
    for matrix, x in zip(read, inputs, strict=True):
        for name in matrix.sources:
            np.testing.assert_allclose(squares[name], np.square(x).mean(0), rtol=1e-5)
    layers = model.spec.sizes.layers
    assert seen[: layers + 2] == [(n + 1, layers + 2) for n in range(layers + 2)]
