"""A step function in NumPy for tests: real attention over real pages, as the compiled one does it.

A one-file Llama without norms: embedding, layers of rotated grouped attention plus residual, tied head. Pages are read
and written exactly as the contract says; `whole` computes the same without any cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = 16
TOP = 64
LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 2, 4, 2, 8, 97, 120
WIDTH = HEADS * HEAD_DIM


def make_weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights: table (V, C), then q (C, C), k and v (C, G D), o (C, C) of each layer."""
    random = np.random.default_rng(seed)
    shapes = {"table": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        for name, columns in (("q", WIDTH), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM), ("o", WIDTH)):
            shapes[f"{name}{layer}"] = (WIDTH, columns)
    return {name: random.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def _rotate(x: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
    """x (N, heads, D) turned by positions (N,), halves layout."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * (0.1 ** np.arange(half))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def top(logits: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """(R, V) -> what a step gives of rows: logits, top ids and values (R, 64), normalizers (R,)."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
    values, most = np.take_along_axis(logits, ids, 1), logits.max(-1, keepdims=True)
    return logits, ids, values, (most[:, 0] + np.log(np.exp(logits - most).sum(-1))).astype(np.float32)


def _attend(q: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """q (H, D) over keys and values (G, T, D) -> (H, D)."""
    grouped = q.reshape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = np.einsum("ghd,gtd->ght", grouped, keys) / HEAD_DIM**0.5
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ght,gtd->ghd", shares / shares.sum(-1, keepdims=True), values).reshape(HEADS, HEAD_DIM)


def _project(x: NDArray[Any], weight: NDArray[Any], positions: NDArray[Any] | None) -> NDArray[Any]:
    heads = (x @ weight).reshape(len(x), -1, HEAD_DIM)
    return heads if positions is None else _rotate(heads, positions)


def make_step(
    weights: dict[str, NDArray[np.float32]], kv: list[NDArray[Any]], calls: list[int] | None = None
) -> Callable[..., tuple[NDArray[Any], ...]]:
    """The step bound to its weights and cache; the rows of each call are appended to `calls`."""

    def step(
        tokens: NDArray[Any], positions: NDArray[Any], seqs: NDArray[Any], slots: NDArray[Any],
        holes: NDArray[Any], page_indptr: NDArray[Any], page_ids: NDArray[Any], logit_rows: NDArray[Any],
    ) -> tuple[NDArray[Any], ...]:  # fmt: skip
        arrays = (tokens, positions, seqs, slots, holes, page_indptr, page_ids, logit_rows)
        assert all(a.dtype == np.int32 and a.ctypes.data % 64 == 0 and a.flags.c_contiguous for a in arrays)
        assert all(a.size for a in (tokens, logit_rows, page_ids))
        assert holes.shape == (len(page_indptr) - 1, 2)
        assert page_indptr[0] == 0
        assert page_indptr[-1] == len(page_ids)
        if calls is not None:
            calls.append(len(tokens))
        x = weights["table"][tokens].astype(np.float64)
        for layer in range(LAYERS):
            x = _through(weights, kv, layer, x, positions, seqs, slots, holes, page_indptr, page_ids)
        return top((x[logit_rows] @ weights["table"].T).astype(np.float32))

    return step


def make_parts(weights: dict[str, NDArray[np.float32]], kv: list[NDArray[Any]]) -> tuple[Any, tuple[Any, ...], Any]:
    """The same step in parts: embed, a part for each layer, head."""
    parts = tuple(partial(_through, weights, kv, layer) for layer in range(LAYERS))

    def head(x: NDArray[Any], logit_rows: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        return top((x[logit_rows] @ weights["table"].T).astype(np.float32))

    return lambda tokens, positions: weights["table"][tokens].astype(np.float64), parts, head


def _through(
    weights: dict[str, NDArray[np.float32]], kv: list[NDArray[Any]], layer: int, x: NDArray[Any],
    positions: NDArray[Any], seqs: NDArray[Any], slots: NDArray[Any], holes: NDArray[Any],
    page_indptr: NDArray[Any], page_ids: NDArray[Any],
) -> NDArray[Any]:  # fmt: skip
    """What the rows x (N, C) are behind a layer."""
    keys = kv[layer][:, 0].reshape(-1, KV_HEADS, HEAD_DIM, PAGE)
    values = kv[layer][:, 1].reshape(-1, KV_HEADS, PAGE, HEAD_DIM)
    q = _project(x, weights[f"q{layer}"], positions)
    k = _project(x, weights[f"k{layer}"], positions)
    v = _project(x, weights[f"v{layer}"], None)
    for row in range(len(x)):
        page = page_ids[page_indptr[seqs[row]] + slots[row] // PAGE]
        keys[page, :, :, slots[row] % PAGE] = k[row]
        values[page, :, slots[row] % PAGE] = v[row]
    out = np.empty_like(q)
    for row in range(len(x)):
        pages = page_ids[page_indptr[seqs[row]] : page_indptr[seqs[row] + 1]]
        seen = np.delete(np.arange(slots[row] + 1), slice(*holes[seqs[row]]))
        all_keys = keys[pages].transpose(1, 0, 3, 2).reshape(KV_HEADS, -1, HEAD_DIM)
        all_values = values[pages].transpose(1, 0, 2, 3).reshape(KV_HEADS, -1, HEAD_DIM)
        out[row] = _attend(q[row], all_keys[:, seen], all_values[:, seen])
    return x + out.reshape(len(x), -1) @ weights[f"o{layer}"]


def whole(weights: dict[str, NDArray[np.float32]], ids: list[int]) -> NDArray[Any]:
    """Logits (N, V) of all positions, computed at once and without a cache."""
    positions = np.arange(len(ids))
    x = weights["table"][ids].astype(np.float64)
    for layer in range(LAYERS):
        q = _project(x, weights[f"q{layer}"], positions)
        k = _project(x, weights[f"k{layer}"], positions).transpose(1, 0, 2)
        v = _project(x, weights[f"v{layer}"], None).transpose(1, 0, 2)
        out = np.stack([_attend(q[i], k[:, : i + 1], v[:, : i + 1]) for i in range(len(ids))])
        x = x + out.reshape(len(x), -1) @ weights[f"o{layer}"]
    return x @ weights["table"].T


def greedy(weights: dict[str, NDArray[np.float32]], prompt: list[int], count: int) -> list[int]:
    """The likeliest next tokens, each from a full recomputation."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(whole(weights, ids)[-1].argmax()))
    return ids[len(prompt) :]
