"""What each op means, in NumPy: slow, obvious, float32. Kernels and passes are tested against these.

Shapes and letters as in compiler/ops/. Functions take arrays in operand order and attributes by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats import BLOCK, FORMATS, from_bf16, to_bf16
from llmc.compiler.formats import quantize_rows as _quantize_rows
from llmc.compiler.kv_pages import KINDS, PAGE

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def embedding(ids: I32, table: F32) -> F32:
    """(M,), (V, C) -> (M, C)."""
    return table[ids]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """(M, C), (C,) -> (M, C)."""
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    return (x * scale * weight).astype(np.float32)


def _centred(x: F32) -> F32:
    """(..., C) less the mean of each row."""
    return x - x.mean(-1, keepdims=True, dtype=np.float32)


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    """(M, C), (C,), (C,) -> (M, C)."""
    return rms_norm(_centred(x), weight, eps) + bias


def qk_norm(
    x: F32, q_weight: F32, k_weight: F32, heads: int, kv_heads: int, head_dim: int, eps: float, kind: str, span: str
) -> F32:
    """(M, (H + 2G) D), q and k weights -> (M, (H + 2G) D), v as it is.

    Weights are (D,) for span "head", which all heads share, else (H D,) and (G D,).
    """
    centred = {"rms": False, "layer": True}[kind]
    q, k, v = np.split(x, [heads * head_dim, (heads + kv_heads) * head_dim], axis=1)

    def normed(part: F32, weight: F32) -> F32:
        row = {"head": head_dim, "heads": head_dim, "all": part.shape[1]}[span]
        rows = part.reshape(len(part), -1, row)
        return rms_norm(_centred(rows) if centred else rows, weight.reshape(-1, row), eps).reshape(part.shape)

    return np.concatenate([normed(q, q_weight), normed(k, k_weight), v], axis=1)


def scale(x: F32, factor: float) -> F32:
    """(M, C) -> (M, C)."""
    return x * np.float32(factor)


def clip(x: F32, bound: float) -> F32:
    """(M, C) -> (M, C)."""
    return np.clip(x, np.float32(-bound), np.float32(bound))


def soft_cap(x: F32, cap: float) -> F32:
    """(M, C) -> (M, C), between -cap and cap."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def add_rms_norm(x: F32, residual: F32, weight: F32, eps: float) -> tuple[F32, F32]:
    """(M, C), (M, C), (C,) -> sum (M, C), normed (M, C)."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def add_layer_norm(x: F32, residual: F32, weight: F32, bias: F32, eps: float) -> tuple[F32, F32]:
    """(M, C), (M, C), (C,), (C,) -> sum (M, C), normed (M, C)."""
    total = x + residual
    return total, layer_norm(total, weight, bias, eps)


def linear(x: F32, weight: F32) -> F32:
    """(M, K), (N, K) -> (M, N)."""
    return x @ weight.T


def rope_table(positions: I32, frequencies: F32, magnitude: float) -> F32:
    """(M,), (R/2,) -> (M, R): cosines, then sines, of float32 angles, times magnitude."""
    angles = positions[:, None].astype(np.float32) * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(magnitude)


def rope(x: F32, table: F32, rotated_heads: int, head_dim: int, layout: str) -> F32:
    """(M, heads * D), (M, R) -> (M, heads * D): the first R numbers of each of the first `rotated_heads`."""
    half = table.shape[1] // 2
    out = x.reshape(x.shape[0], -1, head_dim).copy()
    cos, sin = table[:, None, :half], table[:, None, half:]
    first, second = {
        "half": (slice(0, half), slice(half, 2 * half)),
        "interleaved": (slice(0, 2 * half, 2), slice(1, 2 * half, 2)),
    }[layout]
    a, b = out[:, :rotated_heads, first].copy(), out[:, :rotated_heads, second].copy()
    out[:, :rotated_heads, first] = a * cos - b * sin
    out[:, :rotated_heads, second] = b * cos + a * sin
    return out.reshape(x.shape)


def alibi_slopes(heads: int) -> F32:
    """(H,): how fast scores of each head fall with the distance (https://arxiv.org/abs/2108.12409 and its code).

    2^(-8 (h + 1) / H) for a power of two; for others those of the power below, then every second of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return np.array([2 ** (-8 * (h + 1) / heads) for h in range(heads)], np.float32)
    return np.concatenate([alibi_slopes(power), alibi_slopes(2 * power)[::2][: heads - power]])


def bias_slopes(bias: str, heads: int, scale: float) -> F32:
    """(H,): what attention's `bias` takes off a head's scores for every token of distance."""
    slopes = alibi_slopes(heads)
    return {"none": np.zeros_like(slopes), "alibi": slopes, "scaled_alibi": slopes * np.float32(scale)}[bias]


def attention(
    qkv: F32, kv: NDArray[Any], seqs: I32, slots: I32, page_indptr: I32, page_ids: I32,
    heads: int, kv_heads: int, head_dim: int, scale: float, window: int, kv_dtype: str,
    soft_cap: float, bias: str, causal: int,
) -> F32:  # fmt: skip
    """qkv (M, (H + 2G) D), kv (pages, *page_shape; see kv_pages.py) written in place -> (M, H D).

    Row i attends to slots 0..slots[i], where not `causal` to all that its sequence has after this step, of which a
    window leaves those less than so many away. A window of 0 hides none, a soft_cap of 0 caps none.
    """
    rows = qkv.shape[0]
    q, k, v = np.split(qkv.reshape(rows, -1, head_dim), [heads, heads + kv_heads], axis=1)
    kind = KINDS[kv_dtype]
    slopes = bias_slopes(bias, heads, scale).reshape(kv_heads, -1, 1)
    for i in range(rows):
        kind.store(kv, page_ids[page_indptr[seqs[i]] + slots[i] // PAGE], slots[i] % PAGE, k[i], v[i])
    out = np.empty((rows, heads, head_dim), np.float32)
    for i in range(rows):
        slot = int(slots[i])
        length = 1 + (slot if causal else int(slots[seqs == seqs[i]].max()))
        start, length = (max(0, slot - window + 1), min(length, slot + window)) if window else (0, length)
        first = page_indptr[seqs[i]]
        keys, values = kind.load(kv[page_ids[first : first + -(-length // PAGE)]], head_dim)
        all_keys = keys.transpose(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)[:, start:length]
        all_values = values.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, start:length]
        grouped = q[i].reshape(kv_heads, heads // kv_heads, head_dim)
        scores = np.einsum("ghd,gtd->ght", grouped, all_keys) * np.float32(scale)
        if soft_cap:
            scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
        scores -= slopes * np.abs(np.arange(start, length, dtype=np.float32) - np.float32(slot))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[i] = np.einsum("ght,gtd->ghd", weights, all_values).reshape(heads, head_dim)
    return out.reshape(rows, heads * head_dim)


def gelu(x: F32) -> F32:
    """x times the normal distribution function of x (https://arxiv.org/abs/1606.08415)."""
    erf: F32 = np.array([math.erf(value / math.sqrt(2)) for value in x.ravel().tolist()], np.float32).reshape(x.shape)
    return (x * (1 + erf) / 2).astype(np.float32)


def gelu_tanh(x: F32) -> F32:
    """gelu, approximately (https://arxiv.org/abs/1606.08415 section 2)."""
    return x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))


def _swish(x: F32, beta: float) -> F32:
    """x * sigmoid(beta * x)."""
    with np.errstate(over="ignore"):  # x / inf is 0, as it should be
        return x / (1 + np.exp(np.float32(-beta) * x))


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "silu": lambda x: _swish(x, 1),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_sigmoid": lambda x: _swish(x, 1.702),  # https://arxiv.org/abs/1606.08415 section 2
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "relu_squared": lambda x: np.maximum(x, np.float32(0)) ** 2,
}


def activate(x: F32, activation: str) -> F32:
    """(M, F) -> (M, F)."""
    return ACTIVATIONS[activation](x).astype(np.float32)


def gated(gate_up: F32, activation: str) -> F32:
    """(M, 2F) -> (M, F)."""
    gate, up = np.split(gate_up, 2, axis=1)
    return (ACTIVATIONS[activation](gate) * up).astype(np.float32)


def take_rows(x: F32, rows: I32) -> F32:
    """(M, C), (R,) -> (R, C)."""
    return x[rows]


def argmax(x: F32) -> I32:
    """(M, V) -> (M,)."""
    return x.argmax(-1).astype(np.int32)


def pack(weight: F32, format: str) -> NDArray[Any]:
    """(N, K) -> packed."""
    return FORMATS[format].pack(weight)


def packed_embedding(ids: I32, table: NDArray[Any], format: str, width: int) -> F32:
    """(M,), packed (V, C = width) -> (M, C)."""
    return FORMATS[format].unpack(table, table.shape[0] * 16, width)[ids]


def packed_linear(x: F32, weight: NDArray[Any], format: str, width: int) -> F32:
    """(M, K), packed (N = width, K) -> (M, N)."""
    return x @ FORMATS[format].unpack(weight, width, x.shape[1]).T


def round_rows(x: F32) -> I32:
    """(M, K) -> bfloat16 pairs (M, ceil(K / 2)) as int32 words."""
    padded = np.zeros((x.shape[0], x.shape[1] + x.shape[1] % 2), np.float32)
    padded[:, : x.shape[1]] = x
    return to_bf16(padded).view(np.int32)


def bf16_linear(x: I32, weight: NDArray[Any], format: str, width: int) -> F32:
    """bfloat16 pairs (M, K/2), packed (N = width, K) -> (M, N)."""
    rounded = from_bf16(np.ascontiguousarray(x).view(np.uint16))
    return rounded @ FORMATS[format].unpack(weight, width, rounded.shape[1]).T


def quantize_rows(x: F32) -> tuple[I32, F32, F32]:
    """(M, K) -> codes (M, K64/4) as int32 words, scales (M, K64/32), scaled sums (M, 3 K64/32)."""
    codes, scales, sums = _quantize_rows(x)
    return codes.view(np.int32), scales, sums


def i8_linear(codes: I32, scales: F32, sums: F32, weight: NDArray[Any], format: str, width: int) -> F32:
    """codes * scales (M, K64), packed (N = width, K) -> (M, N); `sums` saves the kernel the offset's work."""
    signed = np.ascontiguousarray(codes).view(np.int8).reshape(codes.shape[0], -1, BLOCK)
    x = (signed * scales[..., None]).reshape(codes.shape[0], -1)
    return x @ FORMATS[format].unpack(weight, width, x.shape[1]).T
