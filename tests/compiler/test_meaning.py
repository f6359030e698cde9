"""What ops mean, against PyTorch and transformers; kernels are tested against these meanings in tests/targets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from llmc.compiler import meaning
from llmc.compiler.meaning import experts
from llmc.compiler.spec.limits import CHOICES

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
    "sigmoid": "sigmoid",
}  # fmt: skip


def test_every_activation_has_a_reference() -> None:
    assert set(NAMES) == set(meaning.ACTIVATIONS)
    assert set(CHOICES["mlp.activation"]) == set(NAMES) - {"sigmoid"} | {"xielu"}  # of gates; with numbers of its own


def test_xielu_is_that_of_transformers() -> None:
    reference = XIELUActivation(alpha_p_init=1.3, alpha_n_init=0.9, dtype=torch.float32)
    x = np.concatenate([3 * _floats(4, 100), np.zeros((4, 1), np.float32)], 1)
    slopes = [meaning.softplus(alpha.detach().numpy()) for alpha in (reference.alpha_p, reference.alpha_n)]
    _close(meaning.xielu(x, *slopes), reference(torch.from_numpy(x)).detach())


def test_a_bounded_gate_by_hand() -> None:
    gate_up = np.array([[-9, 9, 1, 5, -5, 0.5]], np.float32)
    found = meaning.bounded_gated(gate_up, "relu", limit=2.0, plus=1.0)
    np.testing.assert_allclose(found, [[0, -2, 1.5]])


def test_sparse_mixer_is_that_of_transformers() -> None:
    logits = _floats(200, 6)
    for tolerance in (0.01, 0.3):
        weights, ids = sparsemixer(torch.from_numpy(logits), jitter_eps=tolerance, training=False)
        order = ids.argsort(-1)
        found = experts.route(logits, np.zeros(6, np.float32), 2, "sparse_mixer", 0, 1.0, 1, 1, tolerance)
        np.testing.assert_array_equal(found[0], ids.gather(-1, order).numpy())
        _close(found[1], weights.gather(-1, order))


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = 3 * _floats(4, 100)
    wanted = ACT2FN[NAMES[name]](torch.from_numpy(x))
    _close(meaning.activate(x, name), wanted)
    up = _floats(4, 100)
    _close(meaning.gated(np.concatenate([x, up], 1), name), wanted * torch.from_numpy(up))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_turns_the_first_numbers_of_a_head_and_leaves_the_rest(layout: str) -> None:
    """As one multiplication of complex numbers."""
    heads, size, turned = 3, 11, 6
    x, positions, frequencies = _floats(4, heads * size), np.arange(4, dtype=np.int32), _floats(3)
    table = meaning.rope_table(positions, frequencies, magnitude=1.25)
    got = meaning.rope(x, table, rotated_heads=2, head_dim=size, first=0, layout=layout).reshape(4, heads, size)
    before = x.reshape(4, heads, size)
    np.testing.assert_array_equal(got[:, 2], before[:, 2])
    np.testing.assert_array_equal(got[:, :, turned:], before[:, :, turned:])

    def complex_of(y: np.ndarray) -> np.ndarray:
        y = y[:, :2, :turned]
        return y[..., :3] + 1j * y[..., 3:] if layout == "half" else y[..., ::2] + 1j * y[..., 1::2]

    turn = 1.25 * np.exp(1j * positions[:, None] * frequencies)
    np.testing.assert_allclose(complex_of(got), complex_of(before) * turn[:, None], atol=1e-5)


def test_angles_are_exact_however_far_a_text_has_come() -> None:
    positions, frequencies = np.array([0, 7, -5, 10**6 + 1, 2**31 - 1], np.int32), np.float32([1, 0.3, 1e-4])
    table = meaning.rope_table(positions, frequencies, magnitude=1.0)
    angles = [[math.fmod(int(p) * float(f), 2 * math.pi) for f in frequencies] for p in positions]
    np.testing.assert_allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=1e-6)


def test_the_top_of_rows_is_that_of_torch() -> None:
    x = 3 * _floats(4, 100)
    ids, values, normalizers = meaning.top(x)
    wanted = torch.from_numpy(x).topk(64)
    np.testing.assert_array_equal(ids, wanted.indices.numpy())
    np.testing.assert_array_equal(values, wanted.values.numpy())
    _close(normalizers, torch.from_numpy(x).logsumexp(1))


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
