"""A mixture of experts in the graph: router, experts, and the shared expert that every token goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax

if TYPE_CHECKING:
    from llmc.frontends.graph.build import Blocks


def experts_mlp(blocks: Blocks, x: Any) -> Any:
    """(M, C) -> (M, C)."""
    experts, activation = blocks.spec.experts, blocks.spec.mlp.activation
    bias = blocks.weights.get(f"{blocks.prefix}router_bias")
    chosen = blocks.op(
        "route", blocks.op("linear", x, blocks.weights[f"{blocks.prefix}router"]),  # its bias is no part of the product
        relax.const(np.zeros(experts.count, np.float32)) if bias is None else bias,
        used=experts.used, routing=experts.routing, renormalize=int(experts.renormalize), scale=experts.scale,
        groups=experts.groups, groups_used=experts.groups_used,
    )  # fmt: skip
    ids, shares = (blocks.builder.emit(relax.TupleGetItem(chosen, place)) for place in range(2))
    gate, up, down = (blocks.weights[f"{blocks.prefix}experts.{name}"] for name in ("gate", "up", "down"))
    inside = [blocks.op("experts_in", x, ids, weight, experts=experts.count) for weight in (gate, up)]
    h = blocks.op("gated", blocks.concat(inside), activation=activation)
    y = blocks.op("experts_out", h, ids, shares, down, experts=experts.count)
    if not experts.shared_ffn:
        return y
    both = blocks.concat([blocks.linear(x, "shared.gate"), blocks.linear(x, "shared.up")])
    shared = blocks.linear(blocks.op("gated", both, activation=activation), "shared.down")
    if experts.shared_gate:
        shared = blocks.op("gate_rows", shared, blocks.linear(x, "shared_gate"))
    return blocks.add(y, shared)
