"""What each op means, in NumPy: slow, obvious, float32. Kernels and passes are tested against these.

Shapes and letters as in compiler/ops.py. Functions take arrays in operand order and attributes by name.
"""

from __future__ import annotations

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


def qk_norm(x: F32, q_weight: F32, k_weight: F32, heads: int, kv_heads: int, head_dim: int, eps: float) -> F32:
    """(M, (H + 2G) D), (D,), (D,) -> (M, (H + 2G) D): each head of q and of k normed by itself, v as it is."""
    out = x.reshape(x.shape[0], -1, head_dim).copy()
    q, k = slice(0, heads), slice(heads, heads + kv_heads)
    out[:, q] = rms_norm(out[:, q], q_weight, eps)
    out[:, k] = rms_norm(out[:, k], k_weight, eps)
    return out.reshape(x.shape)


def scale(x: F32, factor: float) -> F32:
    """(M, C) -> (M, C)."""
    return x * np.float32(factor)


def add_rms_norm(x: F32, residual: F32, weight: F32, eps: float) -> tuple[F32, F32]:
    """(M, C), (M, C), (C,) -> sum (M, C), normed (M, C)."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def linear(x: F32, weight: F32) -> F32:
    """(M, K), (N, K) -> (M, N)."""
    return x @ weight.T


def rope_table(positions: I32, frequencies: F32) -> F32:
    """(M,), (D/2,) -> (M, D): cosines, then sines, of float32 angles."""
    angles = positions[:, None].astype(np.float32) * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def rope(x: F32, table: F32, rotated_heads: int, head_dim: int, layout: str) -> F32:
    """(M, heads * D), (M, D) -> (M, heads * D); heads after the first `rotated_heads` pass through."""
    half = head_dim // 2
    out = x.reshape(x.shape[0], -1, head_dim).copy()
    cos, sin = table[:, None, :half], table[:, None, half:]
    first, second = (slice(0, half), slice(half, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    a, b = out[:, :rotated_heads, first].copy(), out[:, :rotated_heads, second].copy()
    out[:, :rotated_heads, first] = a * cos - b * sin
    out[:, :rotated_heads, second] = b * cos + a * sin
    return out.reshape(x.shape)


def attention(
    qkv: F32, kv: NDArray[Any], seqs: I32, slots: I32, page_indptr: I32, page_ids: I32,
    heads: int, kv_heads: int, head_dim: int, scale: float, window: int, kv_dtype: str,
) -> F32:  # fmt: skip
    """qkv (M, (H + 2G) D), kv (pages, *page_shape; see kv_pages.py) written in place -> (M, H D).

    Row i attends to slots max(0, slots[i] - window + 1)..slots[i]; window 0 hides none.
    """
    rows = qkv.shape[0]
    q, k, v = np.split(qkv.reshape(rows, -1, head_dim), [heads, heads + kv_heads], axis=1)
    kind = KINDS[kv_dtype]
    for i in range(rows):
        kind.store(kv, page_ids[page_indptr[seqs[i]] + slots[i] // PAGE], slots[i] % PAGE, k[i], v[i])
    out = np.empty((rows, heads, head_dim), np.float32)
    for i in range(rows):
        length = int(slots[i]) + 1
        start = max(0, length - window) if window else 0
        first = page_indptr[seqs[i]]
        keys, values = kind.load(kv[page_ids[first : first + -(-length // PAGE)]], head_dim)
        all_keys = keys.transpose(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)[:, start:length]
        all_values = values.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, start:length]
        grouped = q[i].reshape(kv_heads, heads // kv_heads, head_dim)
        scores = np.einsum("ghd,gtd->ght", grouped, all_keys) * np.float32(scale)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[i] = np.einsum("ght,gtd->ghd", weights, all_values).reshape(heads, head_dim)
    return out.reshape(rows, heads * head_dim)


def gelu_tanh(x: F32) -> F32:
    """x times the normal distribution function of x, approximately (https://arxiv.org/abs/1606.08415 section 2)."""
    return x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))


ACTIVATIONS = {"silu": lambda x: x / (1 + np.exp(-x)), "gelu_tanh": gelu_tanh}


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
