"""What each op means, in NumPy: slow, obvious, float32. Kernels and passes are tested against these.

Shapes and letters as in compiler/ops/. Functions take arrays in operand order and attributes by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats import FORMATS, BlockFormat, dequantize_rows, from_bf16, to_bf16
from llmc.compiler.formats import quantize_rotated as _quantize_rotated
from llmc.compiler.formats import quantize_rows as _quantize_rows
from llmc.compiler.formats import rotate_rows as _rotate_rows

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

TOP = 64  # numbers of a row that `top` gives; most ways to choose a token look at fewer


def embedding(ids: I32, table: F32) -> F32:
    """(M,), (V, C) -> (M, C), zeros where an id is below 0."""
    return np.where(ids[:, None] < 0, np.float32(0), table[ids])


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


def qk_bias(q_bias: F32, k_bias: F32, heads: int, kv_heads: int, head_dim: int) -> F32:
    """(D,) or (H D,), (D,) or (G D,) -> ((H + 2G) D,)."""
    counts = ((q_bias, heads), (k_bias, kv_heads))
    tiled = [np.tile(bias, count * head_dim // len(bias)) for bias, count in counts]
    return np.concatenate([*tiled, np.zeros(kv_heads * head_dim, np.float32)])


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
    """(M,), (R/2,) -> (M, R): cosines, then sines, times magnitude.

    Angles are computed in float64 and rounded within one turn: a text without end has positions without end.
    """
    turns = positions[:, None] * frequencies.astype(np.float64) / (2 * np.pi)
    angles = ((turns - np.rint(turns)) * (2 * np.pi)).astype(np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(magnitude)


def rope(x: F32, table: F32, rotated_heads: int, head_dim: int, first: int, layout: str) -> F32:
    """(M, heads * D), (M, R) -> (M, heads * D): R numbers, from `first` on, of each of the first `rotated_heads`."""
    half, end = table.shape[1] // 2, first + table.shape[1]
    out = x.reshape(x.shape[0], -1, head_dim).copy()
    cos, sin = table[:, None, :half], table[:, None, half:]
    one, other = {
        "half": (slice(first, first + half), slice(first + half, end)),
        "interleaved": (slice(first, end, 2), slice(first + 1, end, 2)),
    }[layout]
    a, b = out[:, :rotated_heads, one].copy(), out[:, :rotated_heads, other].copy()
    out[:, :rotated_heads, one] = a * cos - b * sin
    out[:, :rotated_heads, other] = b * cos + a * sin
    return out.reshape(x.shape)


def gelu(x: F32) -> F32:
    """x times the normal distribution function of x (https://arxiv.org/abs/1606.08415)."""
    erf: F32 = np.array([math.erf(value / math.sqrt(2)) for value in x.ravel().tolist()], np.float32).reshape(x.shape)
    return (x * (1 + erf) / 2).astype(np.float32)


def gelu_tanh(x: F32) -> F32:
    """gelu, approximately (https://arxiv.org/abs/1606.08415 section 2)."""
    return x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x)."""
    with np.errstate(over="ignore"):  # 1 / inf is 0, as it should be
        return np.float32(1) / (np.float32(1) + np.exp(-x))


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
    "sigmoid": sigmoid,
}


def activate(x: F32, activation: str) -> F32:
    """(M, F) -> (M, F)."""
    return ACTIVATIONS[activation](x).astype(np.float32)


def gated(gate_up: F32, activation: str) -> F32:
    """(M, 2F) -> (M, F)."""
    gate, up = np.split(gate_up, 2, axis=1)
    return (ACTIVATIONS[activation](gate) * up).astype(np.float32)


def bounded_gated(gate_up: F32, activation: str, limit: float, plus: float) -> F32:
    """(M, 2F) -> (M, F)."""
    gate, up = np.split(gate_up, 2, axis=1)
    gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    return (ACTIVATIONS[activation](gate) * (up + np.float32(plus))).astype(np.float32)


def softplus(x: F32) -> F32:
    """(N,) -> (N,), log(1 + e^x)."""
    return np.logaddexp(np.float32(0), x).astype(np.float32)


def xielu(x: F32, above: F32, below: F32) -> F32:
    """(M, F), (1,), (1,) -> (M, F)."""
    half = x / 2
    negative = (np.expm1(np.minimum(x, np.float32(-1e-6))) - x) * (below + np.float32(0.5))
    return (np.where(x > 0, above * x * x, negative) + half).astype(np.float32)


def take_rows(x: F32, rows: I32) -> F32:
    """(M, C), (R,) -> (R, C)."""
    return x[rows]


def argmax(x: F32) -> I32:
    """(M, V) -> (M,)."""
    return x.argmax(-1).astype(np.int32)


def top(x: F32) -> tuple[I32, F32, F32]:
    """(M, V) -> ids and values (M, K), and log of the sum of e^x (M,)."""
    ids = np.argsort(-x, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
    values = np.take_along_axis(x, ids, 1)
    most = values[:, :1]
    with np.errstate(invalid="ignore"):  # of a row that is no numbers
        return ids, values, (most[:, 0] + np.log(np.exp(x - most).sum(-1))).astype(np.float32)


def pack(weight: F32, format: str) -> NDArray[Any]:
    """(N, K) -> packed."""
    return FORMATS[format].pack(weight)


def packed_embedding(ids: I32, table: NDArray[Any], format: str, width: int) -> F32:
    """(M,), packed (V, C = width) -> (M, C)."""
    return embedding(ids, FORMATS[format].stored(table, table.shape[0] * 16, width))


def packed_linear(x: F32, weight: NDArray[Any], format: str, width: int) -> F32:
    """(M, K), packed (N = width, K) -> (M, N)."""
    return x @ FORMATS[format].stored(weight, width, x.shape[1]).T


def round_rows(x: F32) -> I32:
    """(M, K) -> bfloat16 pairs (M, ceil(K / 2)) as int32 words."""
    padded = np.zeros((x.shape[0], x.shape[1] + x.shape[1] % 2), np.float32)
    padded[:, : x.shape[1]] = x
    return to_bf16(padded).view(np.int32)


def bf16_linear(x: I32, weight: NDArray[Any], format: str, width: int) -> F32:
    """bfloat16 pairs (M, K/2), packed (N = width, K) -> (M, N)."""
    rounded = from_bf16(np.ascontiguousarray(x).view(np.uint16))
    return rounded @ FORMATS[format].stored(weight, width, rounded.shape[1]).T


def quantize_rows(x: F32) -> tuple[I32, F32, F32, I32]:
    """(M, K) -> codes (M, K64/4) as int32 words, scales (M, K64/32), sums and starts (M, 3 K64/32)."""
    codes, scales, sums, starts = _quantize_rows(x)
    return codes.view(np.int32), scales, sums, starts


def rotate_rows(x: F32, width: int) -> F32:
    """(M, K) -> (M, width): every 64 columns rotated, zeros added to whole ones."""
    return _rotate_rows(x)[:, :width]


def quantize_rotated(x: F32) -> tuple[I32, F32, I32]:
    """(M, K) -> codes (M, K64/4) as int32 words, scales and starts (M, K64/64) of the rotated rows."""
    codes, scales, starts = _quantize_rotated(x)
    return codes.view(np.int32), scales, starts


def left_of(format: BlockFormat, x: F32) -> list[NDArray[Any]]:
    """What rows (M, K) are as int8, on the left of a product with this format."""
    return format.left(quantize_rotated(x) if format.rotated else quantize_rows(x))


def i8_linear(codes: I32, scales: F32, totals: NDArray[Any], weight: NDArray[Any], format: str, width: int) -> F32:
    """codes * scales (M, K64), packed (N = width, K) -> (M, N); `totals` save the kernel the offset's work."""
    x = dequantize_rows(codes, scales)
    return x @ FORMATS[format].stored(weight, width, x.shape[1]).T
