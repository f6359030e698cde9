"""What the ops of experts mean, in NumPy, as meaning.py does for the others: slow, obvious, float32.

Letters: M rows, E experts, U of them used by a row, C model width, F an expert's width. Matrices of experts lie one
under another. An id of -1 is nobody's: a slice of it is zeros, and it adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats import FORMATS, dequantize_rows, from_bf16
from llmc.compiler.meaning import sigmoid

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def _softmax(x: F32) -> F32:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


SCORES: dict[str, Callable[[F32], F32]] = {
    "softmax": _softmax,
    "sigmoid": sigmoid,
    "softmax_of_chosen": lambda x: x,
    "sigmoid_of_chosen": lambda x: x,
}


def route(
    logits: F32, bias: F32, used: int, routing: str, renormalize: int, scale: float, groups: int, groups_used: int,
    tolerance: float,
) -> tuple[I32, F32]:  # fmt: skip
    """(M, E), (E,) -> ids (M, U), ascending, and weights (M, U)."""
    if routing == "sparse_mixer":
        return _sparse_mixer(logits, used, tolerance)
    scores = SCORES[routing](logits)
    choice = scores + bias
    if groups > 1:
        members = choice.reshape(len(choice), groups, -1)
        worth = np.sort(members, -1)[..., -2:].sum(-1) if routing == "sigmoid" else members.max(-1)
        rank = np.argsort(np.argsort(-worth, -1, kind="stable"), -1)
        choice = np.where((rank < groups_used)[..., None], members, np.float32(-np.inf)).reshape(choice.shape)
    ids = np.sort(np.argsort(-choice, -1, kind="stable")[:, :used], -1)
    weights = np.take_along_axis(scores, ids, -1)
    if routing == "sigmoid_of_chosen":
        weights = sigmoid(weights)
    if routing == "softmax_of_chosen":
        weights = _softmax(weights)
    elif renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + np.float32(1e-20))
    return ids.astype(np.int32), (weights * np.float32(scale)).astype(np.float32)


def _sparse_mixer(logits: F32, used: int, tolerance: float) -> tuple[I32, F32]:
    """Experts one after another: the best that is left, weighed among those left that are hardly worse."""
    rows = np.arange(len(logits))
    left = logits.copy()
    ids, weights = [], []
    for _ in range(used):
        best = left.argmax(-1)
        top = left[rows, best][:, None]
        near = (top - left) / np.maximum(np.abs(logits), top) <= np.float32(2 * tolerance)
        ids.append(best)
        weights.append(_softmax(np.where(near, left, np.float32(-np.inf)))[rows, best])
        left[rows, best] = -np.inf
    chosen, shares = np.stack(ids, 1).astype(np.int32), np.stack(weights, 1)
    order = np.argsort(chosen, -1)
    return np.take_along_axis(chosen, order, -1), np.take_along_axis(shares, order, -1).astype(np.float32)


def gate_rows(x: F32, gate: F32) -> F32:
    """(M, C), (M, N) -> (M, C)."""
    slices = x.reshape(*gate.shape, -1)
    return (slices * sigmoid(gate)[..., None]).astype(np.float32).reshape(x.shape)


def experts_bias(x: F32, ids: I32, bias: F32, experts: int) -> F32:
    """(M, U F), (M, U), (E F,) -> (M, U F)."""
    return x + _of_each(bias, ids, experts).reshape(x.shape)


def experts_out_bias(x: F32, ids: I32, weights: F32, bias: F32, experts: int) -> F32:
    """(M, C), (M, U), (M, U), (E C,) -> (M, C)."""
    return (x + np.einsum("mu,muc->mc", weights, _of_each(bias, ids, experts))).astype(np.float32)


def _of_each(bias: F32, ids: I32, experts: int) -> F32:
    """(E F,), (M, U) -> (M, U, F)."""
    return np.where(ids[..., None] < 0, np.float32(0), bias.reshape(experts, -1)[ids])


def experts_in(x: F32, ids: I32, weight: F32, experts: int) -> F32:
    """(M, C), (M, U), (E F, C) -> (M, U F)."""
    matrices = weight.reshape(experts, -1, weight.shape[1])
    out = np.zeros((*ids.shape, matrices.shape[1]), np.float32)
    for row, place in np.argwhere(ids >= 0):
        out[row, place] = matrices[ids[row, place]] @ x[row]
    return out.reshape(len(x), -1)


def experts_out(x: F32, ids: I32, weights: F32, weight: F32, experts: int) -> F32:
    """(M, U F), (M, U), (M, U), (E C, F) -> (M, C)."""
    matrices = weight.reshape(experts, -1, weight.shape[1])
    slices = x.reshape(len(x), ids.shape[1], -1)
    out = np.zeros((len(x), matrices.shape[1]), np.float32)
    for row in range(len(x)):
        for expert, share, part in zip(ids[row], weights[row], slices[row], strict=True):
            if expert >= 0:
                out[row] += share * (matrices[expert] @ part)
    return out


def _from_pairs(x: I32) -> F32:
    """bfloat16 pairs (M, K / 2) -> (M, K)."""
    return from_bf16(np.ascontiguousarray(x).view(np.uint16))


def _unpacked(weight: NDArray[Any], format: str, experts: int, width: int, columns: int) -> F32:
    return FORMATS[format].stored(weight, experts * width, columns)


def packed_experts_in(x: F32, ids: I32, weight: NDArray[Any], format: str, experts: int, width: int) -> F32:
    """(M, C), (M, U), packed (E F, C), F = width -> (M, U F)."""
    return experts_in(x, ids, _unpacked(weight, format, experts, width, x.shape[1]), experts)


def bf16_experts_in(x: I32, ids: I32, weight: NDArray[Any], format: str, experts: int, width: int) -> F32:
    """bfloat16 pairs (M, C / 2), (M, U), packed (E F, C) -> (M, U F)."""
    return packed_experts_in(_from_pairs(x), ids, weight, format, experts, width)


def i8_experts_in(
    codes: I32, scales: F32, totals: NDArray[Any], ids: I32, weight: NDArray[Any], format: str, experts: int, width: int
) -> F32:
    """codes * scales (M, C64), (M, U), packed (E F, C) -> (M, U F)."""
    return packed_experts_in(dequantize_rows(codes, scales), ids, weight, format, experts, width)


def packed_experts_out(
    x: F32, ids: I32, weights: F32, weight: NDArray[Any], format: str, experts: int, width: int
) -> F32:
    """(M, U F), (M, U), (M, U), packed (E C, F), C = width -> (M, C)."""
    columns = x.shape[1] // ids.shape[1]
    return experts_out(x, ids, weights, _unpacked(weight, format, experts, width, columns), experts)


def bf16_experts_out(
    x: I32, ids: I32, weights: F32, weight: NDArray[Any], format: str, experts: int, width: int
) -> F32:
    """bfloat16 pairs (M, U F / 2), (M, U), (M, U), packed (E C, F) -> (M, C)."""
    return packed_experts_out(_from_pairs(x), ids, weights, weight, format, experts, width)


def i8_experts_out(
    codes: I32, scales: F32, totals: NDArray[Any], ids: I32, weights: F32, weight: NDArray[Any],
    format: str, experts: int, width: int,
) -> F32:  # fmt: skip
    """codes * scales (M, U F), F a multiple of 64, (M, U), (M, U), packed (E C, F) -> (M, C)."""
    return packed_experts_out(dequantize_rows(codes, scales), ids, weights, weight, format, experts, width)
