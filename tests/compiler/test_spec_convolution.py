"""Specs with layers that have a convolution: tensors, what does not hold together, and what a step sums."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.errors import SpecError
from llmc.compiler.formats import from_bf16, to_bf16
from llmc.compiler.kv_pages import page_shape
from llmc.compiler.meaning.convolution import short_convolution
from llmc.compiler.spec import Attention, Convolution, ModelSpec, Window, from_toml, tensor_shapes, to_toml
from llmc.compiler.spec.sources import parse

sys.path.insert(0, str(Path(__file__).parent))
from convolved import convolved


def test_a_layer_has_attention_or_a_convolution() -> None:
    shapes = tensor_shapes(convolved(0, 2))
    assert [name for name in shapes if name.startswith("layers.0.")] == [
        "layers.0.conv_in", "layers.0.conv", "layers.0.conv_out", "layers.0.gate", "layers.0.up", "layers.0.down",
        "layers.0.attention_norm", "layers.0.mlp_norm",
    ]  # fmt: skip
    assert (shapes["layers.0.conv_in"], shapes["layers.0.conv"]) == ((192, 64), (3, 64))
    assert {f"layers.1.{name}" for name in "qkvo"} <= shapes.keys()
    assert not [name for name in shapes if name.startswith("layers.1.conv")]


def test_where_all_have_one_no_tensor_of_attention_is_asked_for() -> None:
    assert "layers.{layer}.q" not in convolved(0, 1, 2).tensors


def test_it_is_written_and_read() -> None:
    spec = convolved(1)
    assert from_toml(to_toml(spec)) == spec


_SIZE_8 = Attention("gqa", heads=8, kv_heads=1, head_dim=8, scale=0.25)
FAULTS: dict[str, tuple[Callable[[ModelSpec], object], str]] = {
    "a window": (
        lambda s: replace(s, window=Window(4, (0, 1), 1e4)),
        r"layers \[0\] are of window and of convolution",
    ),
    "no layer": (lambda s: replace(s, convolution=Convolution(3, ())), "convolution.layers has no layer"),
    "a layer too many": (
        lambda s: replace(s, convolution=Convolution(3, (3,))),
        r"convolution.layers = \(3,\), wanted indices from 0 to 2",
    ),
    "one token": (lambda s: replace(s, convolution=Convolution(1, (0,))), "convolution.size = 1, wanted"),
    "small heads": (lambda s: replace(s, attention=_SIZE_8), "attention.head_dim = 8, wanted a multiple of 16"),
    "an encoder": (
        lambda s: replace(s, attention=replace(s.attention, causal=False)),
        "attention.causal = false is not for models with convolutions",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_hold_together_is_refused(fault: str) -> None:
    change, reason = FAULTS[fault]
    with pytest.raises(SpecError, match=reason):
        change(convolved(0))


def test_squeezed_comes_first() -> None:
    assert parse("conv | squeezed | transposed").squeezed
    with pytest.raises(SpecError, match="in this order: squeezed, transposed"):
        parse("conv | transposed | squeezed")


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_channel_sums_its_last_tokens_over_steps_and_pages(kind: str) -> None:
    """The same as one sum over the whole text, of which nothing stands before the beginning."""
    rng = np.random.default_rng(1)
    size, hidden, count = 4, 48, 37
    bcx = rng.standard_normal((count, 3 * hidden)).astype(np.float32)
    taps = rng.standard_normal((size, hidden)).astype(np.float32)
    b, c, x = np.split(bcx, 3, axis=1)
    kept = b * x if kind == "f32" else from_bf16(to_bf16(b * x))
    before = np.concatenate([np.zeros((size - 1, hidden), np.float32), kept])
    wanted = c * sum(taps[j] * before[j : j + count] for j in range(size))
    pages = np.full((5, *page_shape(kind, 1, 16)), 0x7FC0 if kind == "bf16" else np.nan)
    kv = [pages.astype(np.uint16 if kind == "bf16" else np.float32) for _ in range(2)]
    indptr, ids = np.array([0, 3], np.int32), np.array([4, 0, 2], np.int32)
    for rows in np.split(np.arange(count), [1, 20]):
        slots = rows.astype(np.int32)
        parts = [
            short_convolution(bcx[rows], taps, kv[n], np.zeros_like(slots), slots, indptr, ids, 32 * n, kind)
            for n in range(2)
        ]
        assert [part.shape[1] for part in parts] == [32, 16]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), wanted[rows], rtol=1e-5, atol=1e-6)
