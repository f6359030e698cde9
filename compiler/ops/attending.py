"""Rows of the op table for attention and what tells it of places. Letters as in ops/core.py; W: a greatest distance."""

from __future__ import annotations

from typing import Any

from llmc.compiler.meaning import attending as meaning
from llmc.compiler.ops.op import Attr, Op, Result

_PAGED = ("qkv", "kv", "seqs", "slots", "holes", "page_indptr", "page_ids")
_SIZES = ("heads", "kv_heads", "head_dim")


def _mixed(shapes: list[Any], attrs: dict[str, Attr]) -> Result:
    return [((shapes[0][0], int(attrs["heads"]) * int(attrs["head_dim"])), "float32")]


ROWS = (
    Op(
        "attention",
        _PAGED,
        (*_SIZES, "scale", "window", "kv_dtype", "soft_cap", "bias", "causal"),
        _mixed,
        meaning.attention,
        "writes K and V of qkv (M, (H + 2G) D) into kv (pages, *page_shape; see compiler/kv_pages.py), in place, then "
        "row i attends to slots 0..slots[i] of its sequence -> (M, H D), where causal is 0 to those of its sequence's "
        "later rows of this step too; if `window` is not 0, to those less than so many away; of a sequence s not to "
        "slots holes[s, 0]..holes[s, 1] - 1, holes (S, 2), which end with the page that they begin in, or after it. "
        'Scores are scale * q.k, c tanh(that / c) if soft_cap c is not 0, and with bias "alibi" (else "none") less the '
        'distance in slots times the head\'s slope, with bias "scaled_alibi" times scale too; "@F/N" behind either: '
        "the heads are F, F + 1, ... of N. Pages that begin before "
        "their sequence's hole lie nearer by the slots of the hole. "
        "An op with an effect: every page it reads it also wrote, so nothing else may touch kv in a step",
        "https://arxiv.org/abs/2309.06180; GQA https://arxiv.org/abs/2305.13245; window arXiv 2004.05150; soft_cap "
        "arXiv 2408.00118; alibi https://arxiv.org/abs/2108.12409",
    ),
    Op(
        "rope_attention",
        ("qkv", "table", *_PAGED[1:]),
        ("layout", *_SIZES, "scale", "window", "kv_dtype", "soft_cap", "bias", "causal"),
        _mixed,
        meaning.rope_attention,
        "attention of what rope gives for all query and key heads, from their first number on: fused by fuse_rope",
        "https://arxiv.org/abs/2104.09864",
    ),
    Op(
        "attention_with_sinks",
        (*_PAGED, "sinks"),
        (*_SIZES, "scale", "window", "kv_dtype", "soft_cap", "bias", "causal"),
        _mixed,
        meaning.attention_with_sinks,
        "attention whose softmax sums exp(sinks[h]) too: sinks (H,), one more token for every row, its value zeros",
        "https://arxiv.org/abs/2309.17453; learned ones https://arxiv.org/abs/2508.10925",
    ),
    Op(
        "attention_by_distance",
        (*_PAGED, "bias"),
        (*_SIZES, "scale", "window", "kv_dtype", "soft_cap", "causal"),
        _mixed,
        meaning.attention_by_distance,
        "attention with bias (H, 2W + 1) in place of alibi's: to a score is added bias[h, d + W] of d, the key's slot "
        "less the row's, bounded to -W..W, holes as with alibi",
        "https://arxiv.org/abs/1910.10683 section 2.1",
    ),
    Op(
        "cross_attention",
        ("q", "kv", "seqs", "source_lengths", "source_indptr", "source_ids"),
        (*_SIZES, "scale", "kv_dtype"),
        _mixed,
        meaning.cross_attention,
        "row i of q (M, H D) attends to slots 0..source_lengths[s] - 1 of the source of s, its sequence seqs[i], whose "
        "pages source_indptr (S + 1,) and source_ids list -> (M, H D). Writes nothing",
        "https://arxiv.org/abs/1706.03762 section 3.2.3",
    ),
    Op(
        "store_kv",
        ("rows", "kv", "seqs", "slots", "page_indptr", "page_ids"),
        ("kv_heads", "head_dim", "kv_dtype"),
        lambda s, a: [((1,), "int32")],
        meaning.store_kv,
        "writes K and V of rows (M, 2G D) into kv in place, as attention does -> (1,) int32, a zero: for its effect",
        "https://arxiv.org/abs/2309.06180",
    ),
    Op(
        "relative_bias",
        ("table",),
        ("distance", "both"),
        lambda s, a: [((s[0][1], 2 * int(a["distance"]) + 1), "float32")],
        meaning.relative_bias,
        "table (B, H) by buckets of distances -> (H, 2W + 1) by distances -W..W, W = distance: attention_by_distance's "
        "bias. `both` (1): half of the buckets are for keys after the row; runs at compile time",
        "https://arxiv.org/abs/1910.10683 section 2.1",
    ),
    Op(
        "sinusoid",
        ("positions", "frequencies"),
        ("offset",),
        lambda s, a: [((s[0][0], 2 * s[1][0]), "float32")],
        meaning.sinusoid,
        "sines then cosines of (positions (M,) + offset) x frequencies (F,) -> (M, 2F)",
        "https://arxiv.org/abs/1706.03762 section 3.5",
    ),
    Op(
        "grow_queries",
        ("qkv", "positions", "factors"),
        ("columns", "tokens"),
        lambda s, a: [(s[0], "float32")],
        meaning.grow_queries,
        "the first `columns` numbers of row i of qkv (M, W) times factors (N,) at positions[i] // tokens, or the last "
        "factor beyond them -> (M, W)",
        "https://arxiv.org/abs/2501.19399; by spans of tokens, Llama 4",
    ),
)
