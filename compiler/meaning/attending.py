"""What the ops of attention mean, in NumPy, as meaning/__init__.py does for the others: slow, obvious, float32.

Over bf16 pages kernels round softmax weights to bfloat16, which is left out here.

Letters: M rows, H query heads, G kv heads, D head size, S sequences, T tokens that a row sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kv_pages import KINDS, PAGE
from llmc.compiler.meaning import rope

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Pages = NDArray[Any]  # (pages, *page_shape) of one layer, see kv_pages.py


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
    kind, _, place = bias.partition("@")
    first, _, among = (place or f"0/{heads}").partition("/")
    slopes = alibi_slopes(int(among))[int(first) : int(first) + heads]
    return {"none": np.zeros_like(slopes), "alibi": slopes, "scaled_alibi": slopes * np.float32(scale)}[kind]


def attention(
    qkv: F32, kv: Pages, seqs: I32, slots: I32, holes: I32, page_indptr: I32, page_ids: I32,
    heads: int, kv_heads: int, head_dim: int, scale: float, window: int, kv_dtype: str,
    soft_cap: float, bias: str, causal: int,
) -> F32:  # fmt: skip
    """qkv (M, (H + 2G) D), kv written in place -> (M, H D).

    Row i attends to slots 0..slots[i], where not `causal` to all that its sequence has after this step, of which a
    window leaves those less than so many away, and holes (S, 2) those not in [holes[s, 0], holes[s, 1]). A window of 0
    hides none, a soft_cap of 0 caps none.
    """
    none = np.full(heads, -np.inf, np.float32)
    return attention_with_sinks(
        qkv, kv, seqs, slots, holes, page_indptr, page_ids, none,
        heads, kv_heads, head_dim, scale, window, kv_dtype, soft_cap, bias, causal,
    )  # fmt: skip


def rope_attention(
    qkv: F32, table: F32, kv: Pages, seqs: I32, slots: I32, holes: I32, page_indptr: I32, page_ids: I32,
    layout: str, heads: int, kv_heads: int, head_dim: int, **attrs: Any,
) -> F32:  # fmt: skip
    """`attention` of queries and keys that are turned by table (M, R) first."""
    turned = rope(qkv, table, heads + kv_heads, head_dim, 0, layout)
    return attention(
        turned, kv, seqs, slots, holes, page_indptr, page_ids,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, **attrs,
    )  # fmt: skip


def attention_with_sinks(
    qkv: F32, kv: Pages, seqs: I32, slots: I32, holes: I32, page_indptr: I32, page_ids: I32, sinks: F32,
    heads: int, kv_heads: int, head_dim: int, scale: float, window: int, kv_dtype: str,
    soft_cap: float, bias: str, causal: int,
) -> F32:  # fmt: skip
    """`attention` of heads that see one more token, of score sinks[h] and a value of zeros."""
    slopes = bias_slopes(bias, heads, scale)[:, None]
    q = _store(qkv, kv, seqs, slots, page_indptr, page_ids, heads, kv_heads, head_dim, kv_dtype)
    out = np.empty_like(q)
    for i, (seen, places) in enumerate(_seen(seqs, slots, holes, window, causal)):
        keys, values = _tokens(kv, page_ids[page_indptr[seqs[i]] :], kv_dtype, head_dim, seen)
        scores = _scores(q[i], keys, scale, soft_cap) - slopes * np.abs(places).astype(np.float32)
        out[i] = _mix(scores, values, sinks)
    return out.reshape(len(qkv), -1)


def attention_by_distance(
    qkv: F32, kv: Pages, seqs: I32, slots: I32, holes: I32, page_indptr: I32, page_ids: I32, bias: F32,
    heads: int, kv_heads: int, head_dim: int, scale: float, window: int, kv_dtype: str,
    soft_cap: float, causal: int,
) -> F32:  # fmt: skip
    """`attention` with bias (H, 2 W + 1) added to the scores, by the key's slot less the row's, -W..W."""
    most = bias.shape[1] // 2
    q = _store(qkv, kv, seqs, slots, page_indptr, page_ids, heads, kv_heads, head_dim, kv_dtype)
    out = np.empty_like(q)
    for i, (seen, places) in enumerate(_seen(seqs, slots, holes, window, causal)):
        keys, values = _tokens(kv, page_ids[page_indptr[seqs[i]] :], kv_dtype, head_dim, seen)
        distance = np.clip(places, -most, most)
        out[i] = _mix(_scores(q[i], keys, scale, soft_cap) + bias[:, distance + most], values)
    return out.reshape(len(qkv), -1)


def cross_attention(
    q: F32, kv: Pages, seqs: I32, source_lengths: I32, source_indptr: I32, source_ids: I32,
    heads: int, kv_heads: int, head_dim: int, scale: float, kv_dtype: str,
) -> F32:  # fmt: skip
    """q (M, H D), source_lengths (S,), source_indptr (S + 1,) -> (M, H D). Row i sees all of its sequence's source."""
    out = np.empty((len(q), heads, head_dim), np.float32)
    for i, row in enumerate(KINDS[kv_dtype].queries(q.reshape(out.shape))):
        seen = np.arange(source_lengths[seqs[i]])
        keys, values = _tokens(kv, source_ids[source_indptr[seqs[i]] :], kv_dtype, head_dim, seen)
        out[i] = _mix(_scores(row, keys, scale, 0), values)
    return out.reshape(len(q), -1)


def store_kv(
    rows: F32, kv: Pages, seqs: I32, slots: I32, page_indptr: I32, page_ids: I32,
    kv_heads: int, head_dim: int, kv_dtype: str,
) -> I32:  # fmt: skip
    """rows (M, 2G D): K, then V, written into kv in place -> (1,), a zero."""
    _store(rows, kv, seqs, slots, page_indptr, page_ids, 0, kv_heads, head_dim, kv_dtype)
    return np.zeros(1, np.int32)


def relative_bias(table: F32, distance: int, both: int) -> F32:
    """table (B, H) -> (H, 2 W + 1) with W = distance: the row of each distance's bucket, from -W to W.

    Near distances have buckets of their own, further ones share them by their logarithm, up to W, which has the last.
    Where `both`, keys after the row have the second half of the buckets; else they count as at distance 0.
    """
    places = np.arange(-distance, distance + 1)
    buckets = len(table) // (2 if both else 1)
    away = np.abs(places) if both else np.maximum(-places, 0)
    near = buckets // 2
    share = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(near)) / np.float32(np.log(distance / near))
    far = np.minimum(near + (share * np.float32(buckets - near)).astype(np.int64), buckets - 1)
    bucket = np.where(away < near, away, far) + np.where(places > 0, buckets, 0) * both
    return np.ascontiguousarray(table[bucket].T)


def sinusoid(positions: I32, frequencies: F32, offset: int) -> F32:
    """(M,), (F,) -> (M, 2F): sines, then cosines, of float32 angles (position + offset) * frequency."""
    angles = (positions + offset)[:, None].astype(np.float32) * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _store(
    qkv: F32, kv: Pages, seqs: I32, slots: I32, page_indptr: I32, page_ids: I32,
    heads: int, kv_heads: int, head_dim: int, kv_dtype: str,
) -> F32:  # fmt: skip
    """K and V of every row into their pages; what is left of qkv (M, (H + 2G) D): the queries (M, H, D)."""
    q, k, v = np.split(qkv.reshape(len(qkv), -1, head_dim), [heads, heads + kv_heads], axis=1)
    for i, slot in enumerate(slots):
        KINDS[kv_dtype].store(kv, page_ids[page_indptr[seqs[i]] + slot // PAGE], slot % PAGE, k[i], v[i])
    return KINDS[kv_dtype].queries(q)


def _seen(seqs: I32, slots: I32, holes: I32, window: int, causal: int) -> Iterator[tuple[I64, I64]]:
    """The slots that each row sees, and how far after the row they are; a hole takes its slots off that."""
    for seq, slot in zip(seqs, slots.tolist(), strict=True):
        end = 1 + (slot if causal else int(slots[seqs == seq].max()))
        start, end = (max(0, slot - window + 1), min(end, slot + window)) if window else (0, end)
        first, after = holes[seq].tolist()
        seen = np.arange(start, end)
        seen = seen[(seen < first) | (seen >= after)]
        yield seen, seen - slot + np.where(seen // PAGE * PAGE < first, after - first, 0)


def _tokens(kv: Pages, ids: I32, kv_dtype: str, head_dim: int, seen: I64) -> tuple[F32, F32]:
    """K and V (G, T, D) of the slots `seen` of the sequence whose pages are the first of `ids`."""
    used, page = np.unique(seen // PAGE, return_inverse=True)
    keys, values = KINDS[kv_dtype].load(kv[ids[used]], head_dim)
    place = seen % PAGE
    return keys[page, :, :, place].swapaxes(0, 1), values[page, :, place].swapaxes(0, 1)


def _scores(q: F32, keys: F32, scale: float, soft_cap: float) -> F32:
    """(H, D), (G, T, D) -> (H, T)."""
    grouped = q.reshape(len(keys), -1, q.shape[1])
    scores = np.einsum("ghd,gtd->ght", grouped, keys).reshape(len(q), -1) * np.float32(scale)
    return np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap)) if soft_cap else scores


def _mix(scores: F32, values: F32, sinks: F32 | None = None) -> F32:
    """(H, T), (G, T, D) -> (H, D), averages by softmax, in whose sum sinks (H,) take part."""
    top = scores.max(-1) if sinks is None else np.maximum(scores.max(-1), sinks)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks - top))
    grouped = (weights / total[:, None]).reshape(len(values), -1, scores.shape[1])
    return np.einsum("ght,gtd->ghd", grouped, values).reshape(len(scores), -1)


def grow_queries(qkv: F32, positions: I32, factors: F32, columns: int, tokens: int) -> F32:
    """(M, W), (M,), (N,) -> (M, W)."""
    out = qkv.copy()
    out[:, :columns] *= factors[np.minimum(positions // tokens, len(factors) - 1)][:, None]
    return out
