"""The original in parts gives the bits of the original as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.driver.original import Original, runs_in_parts
from llmc.compiler.driver.probe import Probe, as_tensor
from llmc.compiler.driver.vocabulary import Pieces
from llmc.frontends.source import open_model

# What an embedding and a head may have: matrices of their own, scales, biases.
MODELS = {
    "Llama": ("llama", {}),
    "narrow OPT": ("opt", {"ffn_dim": 100, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "Gemma 2": ("gemma2", {"tie_word_embeddings": True, "final_logit_softcapping": 3.0}),
    "Phi": ("phi", {}),
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    kind, config = MODELS[request.param]
    return tiny_model(kind, **config)


@pytest.mark.parametrize("size", [320, 208, 48])  # of a piece of the vocabulary's 320
def test_a_layer_at_a_time_computes_the_same(folder: Path, size: int) -> None:
    ids = np.random.default_rng(0).integers(0, 320, 37).tolist()
    with open_model(folder) as model:
        assert runs_in_parts(model.spec)
        seen: list[tuple[int, int]] = []
        original = Original(model, lambda done, total: seen.append((done, total)), Pieces(320, size))
        (got, short), (squares, _) = original.run([ids, ids[:5]], 2, set())
        (alone,), both = original.run([ids[:5], ids], 1, set())
        probe = Probe(model)
        expected, inputs = probe.run(ids)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(short, expected[:5])
    np.testing.assert_array_equal(alone, expected)
    assert [set(each) for each in both] == [set(squares)] * 2
    read = [matrix for matrix in probe.matrices if matrix.input is not None]
    assert set(squares) == {name for matrix in read for name in matrix.sources}
    for matrix, x in zip(read, inputs, strict=True):
        for name in matrix.sources:
            np.testing.assert_allclose(squares[name], np.square(x).mean(0), rtol=1e-5)
    parts = model.spec.sizes.layers + 2 * -(-320 // size)
    assert seen[:parts] == [(n + 1, parts) for n in range(parts)]


def test_the_vocabulary_is_read_for_what_is_wanted(tiny_llama: Callable[..., Path]) -> None:
    with open_model(tiny_llama()) as model:
        read: list[str] = []
        tensors = {name: _Watched(tensor, name, read) for name, tensor in model.tensors.items()}
        object.__setattr__(model, "tensors", tensors)
        original = Original(model)
        logits, squares = original.run([[1, 2, 3]] * 2, 0, {"layers.0.q"})
        assert logits == []
        assert "embedding" in read
        assert "head" not in read
        assert "layers.0.q" in squares[0]
        assert "head" not in squares[0]
        original.run([[1, 2, 3]], 0, {"head"})
        assert "head" in read


def test_kernels_read_an_array_itself_where_they_can() -> None:
    memory = np.zeros(4096, np.uint8)
    first = -memory.ctypes.data % 64
    ready, shifted = (memory[at : at + 1024].view(np.float32) for at in (first, first + 4))
    read_only = ready[:]
    read_only.flags.writeable = False
    tensors = [as_tensor(array) for array in (ready, shifted, read_only, ready[::2])]
    memory[:] = 1
    assert [bool(tensor.numpy().any()) for tensor in tensors] == [True, False, False, False]


class _Watched:
    """A tensor, and who of them was read."""

    def __init__(self, tensor: Any, name: str, read: list[str]) -> None:
        self._tensor, self._name, self._read = tensor, name, read

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("read"):
            self._read.append(self._name)
        return getattr(self._tensor, attribute)
