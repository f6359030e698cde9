"""What stands before a model's layers in the graph, and what stands behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax

from llmc.frontends.graph.places import add_positions

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks
    from llmc.frontends.graph.inputs import Inputs


def embedding_of(stack: Blocks, table: Any, inputs: Inputs) -> Any:
    """(M,) ids -> (M, C)."""
    spec = stack.spec
    x = stack.op("embedding", inputs.tokens, table)
    if spec.embedding.scale != 1:
        x = stack.op("scale", x, factor=spec.embedding.scale)
    if spec.embedding.bias:
        x = stack.add(x, stack.weights["embedding_bias"])
    if spec.embedding.width:
        x = stack.linear(x, "project_in")
    x = add_positions(stack, x, inputs)
    return stack.norm(x, "embedding_norm") if spec.norm.embedding else x


def head_of(blocks: Blocks, x: Any, inputs: Inputs) -> Any:
    """(M, C) -> logits (R, V) and their top of the rows that want them, or an encoder's hidden (R, C) and argmax."""
    head = blocks.spec.head
    x = blocks.op("take_rows", x, inputs.logit_rows)
    if blocks.spec.norm.final:
        x = blocks.norm(x, "final_norm")
    if head.kind == "hidden":
        return relax.Tuple([x, blocks.op("argmax", x)])
    if head.transform:
        x = blocks.op("activate", blocks.linear(x, "head_transform"), activation=blocks.spec.mlp.activation)
        x = blocks.norm(x, "head_norm")
    if blocks.spec.embedding.width:
        x = blocks.linear(x, "project_out")
    logits = blocks.op("linear", x, blocks.weights["embedding" if head.tied else "head"])
    if head.bias:
        logits = blocks.add(logits, blocks.weights["head_bias"])
    if head.scale != 1:
        logits = blocks.op("scale", logits, factor=head.scale)
    if head.soft_cap:
        logits = blocks.op("soft_cap", logits, cap=head.soft_cap)
    top = blocks.op("top", logits)
    return relax.Tuple([logits, *(blocks.builder.emit(relax.TupleGetItem(top, i)) for i in range(3))])
