"""A step in NumPy for every kind of position, with holes and `turn`; and the same text computed with no cache at all.

A one-file transformer: embedding, layers of grouped attention plus residual, tied head. `by_rows` computes each row
with just the tokens that it is said to see, at the places that these have among them, in float64 and without pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = 16
LAYERS, HEADS, GROUPS, SIZE, VOCAB, CONTEXT, TOP = 2, 4, 2, 8, 97, 128, 64
WIDTH = HEADS * SIZE

Array = NDArray[Any]


@dataclass(frozen=True)
class Place:
    """How the model is told where tokens stand: "rope" of the first `rotated` numbers, "alibi", "learned" or "none"."""

    kind: str
    layout: str = "half"
    rotated: int = SIZE

    def added(self, weights: dict[str, Array], positions: Array) -> Array | int:
        """(N,) -> (N, C) to add to the embedding."""
        return weights["positions"][positions] if self.kind == "learned" else 0

    def turned(self, x: Array, positions: Array) -> Array:
        """x (N, heads, D), turned by positions (N,)."""
        if self.kind != "rope":
            return x
        pairs = self.rotated // 2
        angles = positions[:, None, None] * 0.1 ** np.arange(pairs)
        apart = np.arange(pairs)
        first = 2 * apart if self.layout == "interleaved" else apart
        second = first + 1 if self.layout == "interleaved" else apart + pairs
        y = x.copy()
        y[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        y[..., second] = x[..., second] * np.cos(angles) + x[..., first] * np.sin(angles)
        return y

    def bias(self, distances: Array) -> Array:
        """(T,) tokens back -> (G, H / G, T) to add to scores."""
        slopes = 0.5 ** np.arange(1, HEADS + 1) if self.kind == "alibi" else np.zeros(HEADS)
        return -slopes.reshape(GROUPS, HEADS // GROUPS, 1) * distances


PLACES = {
    "rope": Place("rope"),
    "interleaved": Place("rope", "interleaved"),
    "partial": Place("rope", rotated=4),
    "partial interleaved": Place("rope", "interleaved", 4),
    "alibi": Place("alibi"),
    "learned": Place("learned"),
    "none": Place("none"),
}


def make_weights(seed: int = 0) -> dict[str, Array]:
    """Random weights: table (V, C), positions (CONTEXT, C), then q (C, C), k and v (C, G D), o (C, C) of each layer."""
    random = np.random.default_rng(seed)
    shapes = {"table": (VOCAB, WIDTH), "positions": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        for name, columns in (("q", WIDTH), ("k", GROUPS * SIZE), ("v", GROUPS * SIZE), ("o", WIDTH)):
            shapes[f"{name}{layer}"] = (WIDTH, columns)
    return {name: random.standard_normal(shape).astype(np.float32) / 3 for name, shape in shapes.items()}


def _attend(q: Array, keys: Array, values: Array, bias: Array) -> Array:
    """q (H, D) over keys and values (T, G, D) -> (C,)."""
    scores = np.einsum("ghd,tgd->ght", q.reshape(GROUPS, -1, SIZE), keys) / SIZE**0.5 + bias
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ght,tgd->ghd", shares / shares.sum(-1, keepdims=True), values).reshape(-1)


def _heads(x: Array, weight: Array) -> Array:
    return (x @ weight).reshape(len(x), -1, SIZE)


def make_functions(
    weights: dict[str, Array], kv: list[Array], place: Place
) -> tuple[Callable[..., tuple[Array, ...]], Callable[..., Array] | None]:
    """`step` and `turn` bound to weights and cache; no `turn` without rope."""

    def tokens_of(layer: int, side: int) -> Array:
        """Keys (0) or values (1) of a layer, (pages, 16, G, D), a view."""
        pages = kv[layer][:, side]
        if side == 0:
            return pages.reshape(-1, GROUPS, SIZE, PAGE).transpose(0, 3, 1, 2)
        return pages.reshape(-1, GROUPS, PAGE, SIZE).transpose(0, 2, 1, 3)

    def step(
        tokens: Array, positions: Array, seqs: Array, slots: Array, holes: Array,
        page_indptr: Array, page_ids: Array, logit_rows: Array,
    ) -> tuple[Array, ...]:  # fmt: skip
        x = weights["table"][tokens].astype(np.float64) + place.added(weights, positions)
        pages = page_ids[page_indptr[seqs] + slots // PAGE]
        for layer in range(LAYERS):
            keys, values = tokens_of(layer, 0), tokens_of(layer, 1)
            q = place.turned(_heads(x, weights[f"q{layer}"]), positions)
            keys[pages, slots % PAGE] = place.turned(_heads(x, weights[f"k{layer}"]), positions)
            values[pages, slots % PAGE] = _heads(x, weights[f"v{layer}"])
            out = np.empty_like(x)
            for row, (seq, slot) in enumerate(zip(seqs, slots, strict=True)):
                table, (first, after) = page_ids[page_indptr[seq] :], holes[seq]
                seen = np.array([t for t in range(slot + 1) if not first <= t < after])
                nearer = np.where(seen // PAGE * PAGE < first, after - first, 0)
                place_of = table[seen // PAGE], seen % PAGE
                out[row] = _attend(q[row], keys[place_of], values[place_of], place.bias(slot - seen - nearer))
            x = x + out @ weights[f"o{layer}"]
        logits = (x[logit_rows] @ weights["table"].T).astype(np.float32)
        ids = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
        return logits, ids, np.take_along_axis(logits, ids, 1), np.log(np.exp(logits).sum(-1))

    def turn(by: Array, from_ids: Array, to_ids: Array) -> Array:
        for layer in range(LAYERS):
            keys, values = tokens_of(layer, 0), tokens_of(layer, 1)
            old = keys[from_ids].reshape(-1, GROUPS, SIZE).astype(np.float64)
            keys[to_ids] = place.turned(old, by).reshape(-1, PAGE, GROUPS, SIZE)
            values[to_ids] = values[from_ids]
        return by

    return step, turn if place.kind == "rope" else None


def by_rows(weights: dict[str, Array], place: Place, ids: list[int], seen: list[list[int]]) -> Array:
    """Logits (N, V) where row i sees the tokens seen[i], the last of which is i, each at its place in that list."""
    x = weights["table"][ids].astype(np.float64) + place.added(weights, np.array([len(s) - 1 for s in seen]))
    for layer in range(LAYERS):
        q, k, v = (_heads(x, weights[f"{name}{layer}"]) for name in "qkv")
        out = np.empty_like(x)
        for row, tokens in enumerate(seen):
            places = np.arange(len(tokens))
            keys = place.turned(k[tokens], places)
            out[row] = _attend(
                place.turned(q[row : row + 1], places[-1:])[0], keys, v[tokens], place.bias(places[::-1])
            )
        x = x + out @ weights[f"o{layer}"]
    return x @ weights["table"].T
