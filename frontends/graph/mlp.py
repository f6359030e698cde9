"""The MLP in the graph: what a plain or gated one does between its matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks


def plain_mlp(blocks: Blocks, x: Any) -> Any:
    """(M, C) -> (M, C), of the MLP that is no mixture of experts."""
    if blocks.spec.mlp.kind == "plain":
        return blocks.linear(_activated(blocks, blocks.linear(x, "up")), "down")
    return blocks.linear(gated(blocks, [blocks.linear(x, "gate"), blocks.linear(x, "up")]), "down")


def gated(blocks: Blocks, gate_up: list[Any]) -> Any:
    """activation(gate) * up of two (M, F), bounded first where the spec has a limit."""
    mlp = blocks.spec.mlp
    both = blocks.concat(gate_up)
    if not mlp.limit:
        return blocks.op("gated", both, activation=mlp.activation)
    return blocks.op("bounded_gated", both, activation=mlp.activation, limit=mlp.limit, plus=float(mlp.plus_one))


def _activated(blocks: Blocks, x: Any) -> Any:
    """(M, F) -> (M, F)."""
    activation = blocks.spec.mlp.activation
    if activation != "xielu":
        return blocks.op("activate", x, activation=activation)
    slopes = [blocks.op("softplus", blocks.weights[f"{blocks.prefix}xielu_{side}"]) for side in ("above", "below")]
    return blocks.op("xielu", x, *slopes)
