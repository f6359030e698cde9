"""An encoder-decoder in NumPy for tests: the two functions of such a model over real pages, and the same without any.

Its encoder and decoder are the model of reference_step.py, the decoder with attention to the source after its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

one = sys.modules["reference_step"]  # whoever loads this file has loaded that one
PAGE, LAYERS, KV_HEADS, HEAD_DIM = one.PAGE, one.LAYERS, one.KV_HEADS, one.HEAD_DIM
Weights = dict[str, NDArray[np.float32]]


def make_weights(seed: int = 0) -> Weights:
    """The decoder's weights, the encoder's (encoder.q0, ...) and those of attention to the source (cross.q0, ...)."""
    parts = {"": seed, "encoder.": seed + 1, "cross.": seed + 2}
    return {prefix + name: w for prefix, s in parts.items() for name, w in one.make_weights(s).items()}


def _pages(kv: NDArray[Any], pages: NDArray[Any], end: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values (G, end, D) of a sequence."""
    keys = kv[pages, 0].reshape(-1, KV_HEADS, HEAD_DIM, PAGE).transpose(1, 0, 3, 2)
    values = kv[pages, 1].reshape(-1, KV_HEADS, PAGE, HEAD_DIM).transpose(1, 0, 2, 3)
    return tuple(x.reshape(KV_HEADS, -1, HEAD_DIM)[:, :end] for x in (keys, values))  # type: ignore[return-value]


def _write(kv: NDArray[Any], page: int, slot: int, key: NDArray[Any], value: NDArray[Any]) -> None:
    kv[page, 0].reshape(KV_HEADS, HEAD_DIM, PAGE)[:, :, slot % PAGE] = key
    kv[page, 1].reshape(KV_HEADS, PAGE, HEAD_DIM)[:, slot % PAGE] = value


def _heads(x: NDArray[Any], weights: Weights, name: str, positions: NDArray[Any] | None) -> tuple[NDArray[Any], ...]:
    """q (N, H, D), k and v (N, G, D) of one attention: `name` is q, k and v of a layer less that letter."""
    prefix, layer = name[:-1], name[-1]
    q, k = (one._project(x, weights[f"{prefix}{letter}{layer}"], positions) for letter in "qk")
    return q, k, one._project(x, weights[f"{prefix}v{layer}"], None)


def make_functions(
    weights: Weights, kv: list[NDArray[Any]], calls: list[tuple[str, int]]
) -> tuple[Callable[..., Any], ...]:
    """(step, encode), bound to weights and cache; each call appends its name and its rows to `calls`."""

    def self_attention(
        x: NDArray[Any],
        prefix: str,
        layer: int,
        positions: Any,
        seqs: Any,
        slots: Any,
        indptr: Any,
        ids: Any,
        causal: bool,
    ) -> NDArray[Any]:
        q, k, v = _heads(x, weights, f"{prefix}{layer}", positions)
        own = [ids[indptr[s] : indptr[s + 1]] for s in seqs]
        for row, slot in enumerate(slots):
            _write(kv[layer], own[row][slot // PAGE], slot, k[row], v[row])
        ends = [slots[row] if causal else slots[seqs == seqs[row]].max() for row in range(len(x))]
        out = [one._attend(q[i], *_pages(kv[layer], own[i], ends[i] + 1)) for i in range(len(x))]
        return np.stack(out).reshape(len(x), -1) @ weights[f"{prefix}o{layer}"]

    def encode(
        tokens: Any, positions: Any, seqs: Any, slots: Any, holes: Any, indptr: Any, ids: Any, rows: Any
    ) -> tuple[Any, ...]:
        calls.append(("encode", len(tokens)))
        x = weights["encoder.table"][tokens].astype(np.float64)
        for layer in range(LAYERS):
            x = x + self_attention(x, "encoder.", layer, positions, seqs, slots, indptr, ids, False)
        for layer in range(LAYERS):  # over what the encoder itself left there
            _, k, v = _heads(x, weights, f"cross.{layer}", None)
            for row, slot in enumerate(slots):
                _write(kv[layer], ids[indptr[seqs[row]] + slot // PAGE], slot, k[row], v[row])
        hidden = x[rows].astype(np.float32)
        return hidden, hidden.argmax(-1).astype(np.int32)

    def step(
        tokens: Any, positions: Any, seqs: Any, slots: Any, holes: Any, indptr: Any, ids: Any, rows: Any,
        source_lengths: Any, source_indptr: Any, source_ids: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        arrays = (source_lengths, source_indptr, source_ids)
        assert all(a.dtype == np.int32 and a.ctypes.data % 64 == 0 and a.flags.c_contiguous for a in arrays)
        assert len(source_lengths) == len(indptr) - 1 == len(source_indptr) - 1
        assert (source_indptr[0], source_indptr[-1]) == (0, len(source_ids))
        calls.append(("step", len(tokens)))
        x = weights["table"][tokens].astype(np.float64)
        for layer in range(LAYERS):
            x = x + self_attention(x, "", layer, positions, seqs, slots, indptr, ids, True)
            q = _heads(x, weights, f"cross.{layer}", None)[0]
            out = np.empty_like(q)
            for row, s in enumerate(seqs):
                pages = source_ids[source_indptr[s] : source_indptr[s + 1]]
                out[row] = one._attend(q[row], *_pages(kv[layer], pages, source_lengths[s]))
            x = x + out.reshape(len(x), -1) @ weights[f"cross.o{layer}"]
        result: tuple[Any, ...] = one.top((x[rows] @ weights["table"].T).astype(np.float32))
        return result

    return step, encode


def _over(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], ends: list[int]) -> NDArray[Any]:
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    return np.stack([one._attend(q[i], k[:, :end], v[:, :end]) for i, end in enumerate(ends)]).reshape(len(q), -1)


def whole(weights: Weights, source: list[int], answer: list[int]) -> NDArray[Any]:
    """Logits (N, V) of all positions of an answer to a source, computed at once and without a cache."""
    s, n = len(source), len(answer)
    x = weights["encoder.table"][source].astype(np.float64)
    for layer in range(LAYERS):
        q, k, v = _heads(x, weights, f"encoder.{layer}", np.arange(s))
        x = x + _over(q, k, v, [s] * s) @ weights[f"encoder.o{layer}"]
    y = weights["table"][answer].astype(np.float64)
    for layer in range(LAYERS):
        q, k, v = _heads(y, weights, str(layer), np.arange(n))
        y = y + _over(q, k, v, list(range(1, n + 1))) @ weights[f"o{layer}"]
        q = _heads(y, weights, f"cross.{layer}", None)[0]
        _, k, v = _heads(x, weights, f"cross.{layer}", None)
        y = y + _over(q, k, v, [s] * n) @ weights[f"cross.o{layer}"]
    return y @ weights["table"].T


def greedy(weights: Weights, source: list[int], lead: list[int], count: int) -> list[int]:
    """The likeliest tokens after `lead`, each from a full recomputation."""
    ids = list(lead)
    for _ in range(count):
        ids.append(int(whole(weights, source, ids)[-1].argmax()))
    return ids[len(lead) :]
