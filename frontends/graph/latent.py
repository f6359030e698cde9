"""Latent attention in the graph, in the form that absorbs matrices (https://arxiv.org/abs/2405.04434 section 2.1).

A query times the key k_up c that a latent c stands for is k_up^T times the query, times c: heads compare with latents
as they are kept, and all share one key, [latent | rotated]. What they give is a mixture of latents, of which v_up makes
their values. That key stands in a token's page as the value too, with zeros for what is rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.compiler.spec import cached_heads

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks
    from llmc.frontends.graph.inputs import Sight


def latent_attention(blocks: Blocks, x: Any, sight: Sight) -> Any:
    """(M, C) -> (M, C)."""
    spec, heads = blocks.spec, blocks.spec.attention.heads
    read = _latent(blocks, x, "q_down") if spec.latent.q_rank else x
    latent = _latent(blocks, x, "kv_down")
    rotated = blocks.concat([blocks.linear(read, "q_rope"), blocks.linear(x, "k_rope")])
    if sight.table is not None:
        rotated = blocks.op(
            "rope", rotated, sight.table,
            rotated_heads=heads + 1, head_dim=spec.latent.rope_dim, first=0, layout=spec.position.layout,
        )  # fmt: skip
    queries = _of_heads(blocks, blocks.linear(read, "q_plain"), "k_up")
    rows = blocks.op("latent_rows", queries, rotated, latent, heads=heads)
    kv_heads, size = cached_heads(spec)
    mixed = blocks.mixed(rows, sight, {"heads": heads, "kv_heads": kv_heads, "head_dim": size})
    return blocks.linear(_of_heads(blocks, mixed, "v_up"), "o")


def _latent(blocks: Blocks, x: Any, name: str) -> Any:
    """(M, C) -> a latent (M, L), normed."""
    weight = blocks.weights[f"{blocks.prefix}{name}_norm"]
    return blocks.op("rms_norm", blocks.linear(x, name), weight, eps=blocks.spec.latent.eps)


def _of_heads(blocks: Blocks, x: Any, name: str) -> Any:
    """(M, H S) -> (M, H N): each head's columns times its matrix."""
    return blocks.op("head_linear", x, blocks.weights[blocks.prefix + name], heads=blocks.spec.attention.heads)
