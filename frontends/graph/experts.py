"""A mixture of experts in the graph: router, experts, and the shared expert that every token goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax

from llmc.frontends.graph.mlp import gated

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks


def experts_mlp(blocks: Blocks, x: Any) -> Any:
    """(M, C) -> (M, C)."""
    y = _all_experts(blocks, x)
    return blocks.norm(y, "experts_norm") if blocks.spec.experts.norm else y


def _all_experts(blocks: Blocks, x: Any) -> Any:
    """What those that a row was routed to and the shared one give: (M, C) -> (M, C)."""
    experts = blocks.spec.experts
    ids, shares = _routed(blocks, x)
    inside = []
    for name in ("gate", "up"):
        y = blocks.op("experts_in", x, ids, blocks.weights[f"{blocks.prefix}experts.{name}"], experts=experts.count)
        bias = blocks.weights.get(f"{blocks.prefix}experts.{name}_bias")
        inside.append(y if bias is None else blocks.op("experts_bias", y, ids, bias, experts=experts.count))
    down = blocks.weights[f"{blocks.prefix}experts.down"]
    y = blocks.op("experts_out", gated(blocks, inside), ids, shares, down, experts=experts.count)
    if experts.biases:
        bias = blocks.weights[f"{blocks.prefix}experts.down_bias"]
        y = blocks.op("experts_out_bias", y, ids, shares, bias, experts=experts.count)
    if not experts.shared_ffn:
        return y
    both = [blocks.linear(x, "shared.gate"), blocks.linear(x, "shared.up")]
    shared = blocks.linear(gated(blocks, both), "shared.down")
    if experts.shared_gate:
        shared = blocks.op("gate_rows", shared, blocks.linear(x, "shared_gate"))
    return blocks.add(y, shared)


def _routed(blocks: Blocks, x: Any) -> tuple[Any, Any]:
    """Which experts the rows of x (M, C) go through, and their weights: both (M, U)."""
    experts = blocks.spec.experts
    bias = blocks.weights.get(f"{blocks.prefix}router_bias")
    product_bias = blocks.weights.get(f"{blocks.prefix}router_product_bias")
    numbers = blocks.op("linear", x, blocks.weights[f"{blocks.prefix}router"])
    chosen = blocks.op(
        "route", numbers if product_bias is None else blocks.add(numbers, product_bias),
        relax.const(np.zeros(experts.count, np.float32)) if bias is None else bias,
        used=experts.used, routing=experts.routing, renormalize=int(experts.renormalize), scale=experts.scale,
        groups=experts.groups, groups_used=experts.groups_used, tolerance=experts.tolerance,
    )  # fmt: skip
    ids, shares = (blocks.builder.emit(relax.TupleGetItem(chosen, place)) for place in range(2))
    return ids, shares
