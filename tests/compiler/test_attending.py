"""What the ops of attention mean, against PyTorch and transformers; kernels are tested against these meanings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from llmc.compiler.meaning import attending as meaning

RNG = np.random.default_rng(4)
ROWS, HEADS, SIZE = 20, 6, 8
ONE_SEQUENCE = [
    np.zeros(ROWS, np.int32), np.arange(ROWS, dtype=np.int32), np.zeros((1, 2), np.int32),
    np.array([0, 2], np.int32), np.array([1, 0], np.int32),
]  # fmt: skip
PLAIN: dict[str, Any] = {
    "heads": HEADS, "kv_heads": HEADS, "head_dim": SIZE, "scale": 0.3, "window": 0, "kv_dtype": "f32", "soft_cap": 0.0,
    "causal": 1,
}  # fmt: skip


def _floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _close(got: np.ndarray, wanted: torch.Tensor) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(
        got, wanted.numpy(), rtol=0, atol=5e-6
    )  # scores of about 10 in float32 are right to 1e-6


def _pages() -> np.ndarray:
    return np.zeros((2, 2, HEADS, SIZE * 16), np.float32)


def _split(qkv: np.ndarray) -> torch.Tensor:
    """q, k and v (3, H, M, D)."""
    return torch.from_numpy(qkv).reshape(ROWS, 3, HEADS, SIZE).permute(1, 2, 0, 3)


def _distance() -> torch.Tensor:
    """(M, M): of a key from a row."""
    return torch.arange(ROWS) - torch.arange(ROWS)[:, None]


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
    qkv = 2 * _floats(ROWS, 3 * HEADS * SIZE)
    attrs = PLAIN | {"window": window, "soft_cap": soft_cap, "bias": bias, "causal": causal}
    got = meaning.attention(qkv, _pages(), *ONE_SEQUENCE, **attrs)
    q, k, v = _split(qkv)
    scores, distance = 0.3 * q @ k.transpose(1, 2), _distance()
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias == "alibi":
        slopes = build_alibi_tensor(torch.ones((1, 2)), HEADS, torch.float32)[:, :, 1:]
        scores = scores - slopes * distance.abs()
    hidden = (distance.abs() >= (window or ROWS)) | ((distance > 0) & bool(causal))
    wanted = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
    _close(got, wanted.transpose(0, 1).reshape(ROWS, HEADS * SIZE))


@pytest.mark.parametrize("bias", ["alibi", "by distance"])
def test_what_is_in_a_hole_is_not_there(bias: str) -> None:
    """Seventeen slots that no row sees (their pages list another's) and then the rest: as if these had never been."""
    qkv, table = 2 * _floats(40, 3 * HEADS * SIZE), _floats(HEADS, 81)
    seen = np.r_[0:5, 32:40]
    index = [np.zeros(40, np.int32), np.arange(40, dtype=np.int32)]
    listed = np.array([0, 3], np.int32), np.array([2, 0, 1], np.int32)

    def rows(qkv: np.ndarray, index: list[np.ndarray], hole: tuple[int, int]) -> np.ndarray:
        kv, holes = np.zeros((3, 2, HEADS, SIZE * 16), np.float32), np.array([hole], np.int32)
        if bias == "alibi":
            return meaning.attention(qkv, kv, *index, holes, *listed, **PLAIN, bias=bias)
        return meaning.attention_by_distance(qkv, kv, *index, holes, *listed, table, **PLAIN)

    got = rows(qkv, index, (5, 32))
    alone = rows(qkv[seen], [each[: len(seen)] for each in index], (0, 0))
    np.testing.assert_allclose(got[32:], alone[5:], atol=5e-6)


def test_sinks_are_one_more_column_of_scores() -> None:
    """As gpt-oss has them: softmax over the scores and the sink, then the sink's share is dropped."""
    qkv, sinks = 2 * _floats(ROWS, 3 * HEADS * SIZE), 3 * _floats(HEADS)
    got = meaning.attention_with_sinks(qkv, _pages(), *ONE_SEQUENCE, sinks, **PLAIN, bias="none")
    q, k, v = _split(qkv)
    scores = (0.3 * q @ k.transpose(1, 2)).masked_fill(_distance() > 0, -torch.inf)
    column = torch.from_numpy(sinks)[:, None, None].expand(HEADS, ROWS, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    _close(got, (weights @ v).transpose(0, 1).reshape(ROWS, -1))


@pytest.mark.parametrize("causal", [1, 0])
def test_a_bias_by_distance_is_added_to_the_scores(causal: int) -> None:
    """Further away than the bias goes (7 of 19 tokens) its last numbers hold."""
    qkv, bias = 2 * _floats(ROWS, 3 * HEADS * SIZE), _floats(HEADS, 15)
    got = meaning.attention_by_distance(qkv, _pages(), *ONE_SEQUENCE, bias, **PLAIN | {"causal": causal})
    q, k, v = _split(qkv)
    scores = 0.3 * q @ k.transpose(1, 2) + torch.from_numpy(bias)[:, _distance().clamp(-7, 7) + 7]
    hidden = (_distance() > 0) & bool(causal)
    wanted = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
    _close(got, wanted.transpose(0, 1).reshape(ROWS, -1))


def test_stored_sources_are_attended_to_whole() -> None:
    """Two sources of 3 and 17 tokens, stored in one step, read by rows of three sequences."""
    lengths, seqs = [3, 17], np.array([1, 0, 1, 2], np.int32)
    pages, indptr = np.array([2, 0, 1], np.int32), np.array([0, 1, 3], np.int32)
    kv, rows, q = (
        np.zeros((3, 2, HEADS, SIZE * 16), np.float32),
        _floats(20, 2 * HEADS * SIZE),
        _floats(4, HEADS * SIZE),
    )
    of_rows = np.repeat(np.arange(2, dtype=np.int32), lengths)
    slots = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    sizes = {"kv_heads": HEADS, "head_dim": SIZE, "kv_dtype": "f32"}
    assert meaning.store_kv(rows, kv, of_rows, slots, indptr, pages, **sizes).tolist() == [0]

    source = np.array([0, 1, 1], np.int32)  # of each sequence
    of_sequences = np.array([0, 1, 3, 5], np.int32), np.array([2, 0, 1, 0, 1], np.int32)
    got = meaning.cross_attention(
        q, kv, seqs, np.array(lengths, np.int32)[source], *of_sequences, heads=HEADS, scale=0.3, **sizes
    )
    for i, seq in enumerate(seqs):
        k, v = torch.from_numpy(rows[of_rows == source[seq]]).reshape(-1, 2, HEADS, SIZE).permute(1, 2, 0, 3)
        query = torch.from_numpy(q[i]).reshape(HEADS, 1, SIZE)
        wanted = F.scaled_dot_product_attention(query, k, v, scale=0.3)
        _close(got[i], wanted.reshape(-1))


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (32, 20), (16, 1000), (6, 50), (64, 256)])
@pytest.mark.parametrize("both", [0, 1])
def test_relative_biases_are_those_of_t5(both: int, buckets: int, distance: int) -> None:
    places = torch.arange(-1000, 1001)
    wanted = T5Attention._relative_position_bucket(places, bool(both), buckets, distance).numpy()
    table = np.arange(2 * buckets, dtype=np.float32).reshape(buckets, 2)
    got = meaning.relative_bias(table, distance=distance, both=both)
    assert got.shape == (2, 2 * distance + 1)
    clipped = np.clip(places.numpy(), -distance, distance) + distance
    np.testing.assert_array_equal(got[:, clipped], table[wanted].T)


def test_sinusoids_are_those_of_m2m100() -> None:
    wanted = M2M100SinusoidalPositionalEmbedding.get_embedding(40, 12)[2:]
    frequencies = (10000 ** (-np.arange(6) / 5)).astype(np.float32)
    got = meaning.sinusoid(np.arange(38, dtype=np.int32), frequencies, offset=2)
    np.testing.assert_allclose(got, wanted.numpy(), atol=5e-6)
