"""What may happen to heads besides attention itself: norms of queries and keys, a gate on what the heads give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks


def qk_norm(blocks: Blocks, qkv: Any) -> Any:
    """(M, (H + 2G) D), its queries and keys normed where the spec says so."""
    attention, norm = blocks.spec.attention, blocks.spec.norm
    if attention.qk_norm == "none":
        return qkv
    counts = {"q": attention.heads, "k": attention.kv_heads}
    shared = attention.qk_norm == "head"
    weights = []
    for name, heads in counts.items():
        ones = np.ones(attention.head_dim * (1 if shared else heads), np.float32)
        weight = blocks.weights.get(f"{blocks.prefix}{name}_norm")
        weights.append(relax.const(ones) if weight is None else weight)
    qkv = blocks.op(
        "qk_norm", qkv, *weights, **blocks.head_sizes(), eps=norm.eps, kind=norm.kind, span=attention.qk_norm
    )
    if not attention.qk_norm_bias:
        return qkv
    biases = [blocks.weights[f"{blocks.prefix}{name}_norm_bias"] for name in counts]
    return blocks.add(qkv, blocks.op("qk_bias", *biases, **blocks.head_sizes()))


def grown_queries(blocks: Blocks, qkv: Any, positions: Any, columns: int) -> Any:
    """(M, W), its first `columns`, the queries, as the spec has them grow with their positions (M,)."""
    scaling = blocks.spec.scaling
    if scaling is None or not scaling.queries:
        return qkv
    spans = np.arange(blocks.spec.sizes.context // scaling.original_context + 1)
    factors = relax.const((1 + scaling.queries * np.log1p(spans)).astype(np.float32))
    return blocks.op("grow_queries", qkv, positions, factors, columns=columns, tokens=scaling.original_context)


def gated_heads(blocks: Blocks, x: Any, mixed: Any) -> Any:
    """What the heads give (M, H D), times the sigmoid of its gate's product with what attention read, x (M, C)."""
    kind = blocks.spec.attention.gate
    if kind == "none":
        return mixed
    gate = blocks.linear(x, "attention_gate")
    if kind == "head":
        return blocks.op("gate_rows", mixed, gate)
    return blocks.op("gated", blocks.concat([gate, mixed]), activation="sigmoid")
