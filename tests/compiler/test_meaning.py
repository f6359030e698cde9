"""What ops mean, against PyTorch and transformers; kernels are tested against these meanings in tests/targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from llmc.compiler import meaning
from llmc.compiler.spec.blocks import CHOICES

RNG = np.random.default_rng(4)


def _floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _close(got: np.ndarray, wanted: torch.Tensor) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted.numpy(), rtol=2e-6, atol=2e-6)


def test_layer_norm_is_that_of_torch() -> None:
    x, weight, bias = 3 * _floats(5, 48) + 7, _floats(48), _floats(48)
    wanted = F.layer_norm(*(torch.from_numpy(x), (48,)), torch.from_numpy(weight), torch.from_numpy(bias), 1e-5)
    np.testing.assert_allclose(meaning.layer_norm(x, weight, bias, 1e-5), wanted.numpy(), atol=5e-6)
    total, normed = meaning.add_layer_norm(x - 1, np.ones_like(x), weight, bias, 1e-5)
    np.testing.assert_allclose(total, x, atol=1e-6)
    np.testing.assert_allclose(normed, wanted.numpy(), atol=1e-5)


# Our names for what transformers calls these.
NAMES = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_sigmoid": "quick_gelu", "relu": "relu",
    "relu_squared": "relu2",
}  # fmt: skip


def test_every_activation_has_a_reference() -> None:
    assert set(NAMES) == set(meaning.ACTIVATIONS) == set(CHOICES["mlp.activation"])


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = 3 * _floats(4, 100)
    wanted = ACT2FN[NAMES[name]](torch.from_numpy(x))
    _close(meaning.activate(x, name), wanted)
    up = _floats(4, 100)
    _close(meaning.gated(np.concatenate([x, up], 1), name), wanted * torch.from_numpy(up))


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20, 71, 112])
def test_slopes_of_alibi_are_those_of_bloom(heads: int) -> None:
    wanted = build_alibi_tensor(torch.ones((1, 2)), heads, torch.float32)[:, 0, 1]  # at distance 1 from the first token
    np.testing.assert_allclose(meaning.alibi_slopes(heads), wanted.numpy(), rtol=1e-6)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("causal", [1, 0])
@pytest.mark.parametrize("bias", ["none", "alibi"])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_attention_over_pages_is_plain_attention(soft_cap: float, bias: str, causal: int, window: int) -> None:
    """Twenty rows of one sequence at once: a mask, a cap as Gemma 2 has it, and BLOOM's bias."""
    rows, heads, size = 20, 6, 8
    qkv = 2 * _floats(rows, (heads + 2 * heads) * size)
    kv, places = np.zeros((2, 2, heads, size * 16), np.float32), np.arange(rows, dtype=np.int32)
    index = [np.zeros(rows, np.int32), places, np.array([0, 2], np.int32), np.array([1, 0], np.int32)]
    got = meaning.attention(
        qkv, kv, *index, heads=heads, kv_heads=heads, head_dim=size, scale=0.3, window=window, kv_dtype="f32",
        soft_cap=soft_cap, bias=bias, causal=causal,
    )  # fmt: skip
    q, k, v = torch.from_numpy(qkv).reshape(rows, 3, heads, size).permute(1, 2, 0, 3)
    scores = 0.3 * q @ k.transpose(1, 2)
    distance = torch.arange(rows) - torch.arange(rows)[:, None]  # of a key from a row
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias == "alibi":
        slopes = build_alibi_tensor(torch.ones((1, 2)), heads, torch.float32)[:, :, 1:]
        scores = scores - slopes * distance.abs()
    hidden = (distance.abs() >= (window or rows)) | ((distance > 0) & bool(causal))
    wanted = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
    _close(got, wanted.transpose(0, 1).reshape(rows, heads * size))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_turns_the_first_numbers_of_a_head_and_leaves_the_rest(layout: str) -> None:
    """As one multiplication of complex numbers."""
    heads, size, turned = 3, 11, 6
    x, positions, frequencies = _floats(4, heads * size), np.arange(4, dtype=np.int32), _floats(3)
    table = meaning.rope_table(positions, frequencies, magnitude=1.25)
    got = meaning.rope(x, table, rotated_heads=2, head_dim=size, layout=layout).reshape(4, heads, size)
    before = x.reshape(4, heads, size)
    np.testing.assert_array_equal(got[:, 2], before[:, 2])
    np.testing.assert_array_equal(got[:, :, turned:], before[:, :, turned:])

    def complex_of(y: np.ndarray) -> np.ndarray:
        y = y[:, :2, :turned]
        return y[..., :3] + 1j * y[..., 3:] if layout == "half" else y[..., ::2] + 1j * y[..., 1::2]

    turn = 1.25 * np.exp(1j * positions[:, None] * frequencies)
    np.testing.assert_allclose(complex_of(got), complex_of(before) * turn[:, None], atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_spans_of_the_norm_of_q_and_k(kind: str) -> None:
    heads, groups, size = 4, 2, 8
    qkv, shared, own, own_k = _floats(3, 64), _floats(size), _floats(heads * size), _floats(groups * size)
    norm = {
        "rms": lambda x, weight: F.rms_norm(torch.from_numpy(x), weight.shape, torch.from_numpy(weight), 1e-6),
        "layer": lambda x, weight: F.layer_norm(torch.from_numpy(x), weight.shape, torch.from_numpy(weight), eps=1e-6),
    }[kind]
    sizes = {"heads": heads, "kv_heads": groups, "head_dim": size, "eps": 1e-6, "kind": kind}

    by_head = meaning.qk_norm(qkv, shared, 2 * shared, span="head", **sizes)
    apart = meaning.qk_norm(qkv, own, own_k, span="heads", **sizes)
    whole = meaning.qk_norm(qkv, own, own_k, span="all", **sizes)
    for head in range(heads + groups):
        at = slice(head * size, (head + 1) * size)
        twice = 1 if head < heads else 2
        _close(by_head[:, at], norm(qkv[:, at], twice * shared))
        weight = own[at] if head < heads else own_k[(head - heads) * size :][:size]
        _close(apart[:, at], norm(qkv[:, at], weight))
    _close(whole[:, :32], norm(qkv[:, :32], own))
    _close(whole[:, 32:48], norm(qkv[:, 32:48], own_k))
    for out in (by_head, apart, whole):
        np.testing.assert_array_equal(out[:, 48:], qkv[:, 48:])


def test_bounds() -> None:
    x = np.array([[-9.0, -0.5, 0.0, 2.0, 1e30]], np.float32)
    np.testing.assert_array_equal(meaning.clip(x, 2), [[-2, -0.5, 0, 2, 2]])
    np.testing.assert_allclose(meaning.soft_cap(x, 2), [[-2 * np.tanh(4.5), -2 * np.tanh(0.25), 0, 2 * np.tanh(1), 2]])
