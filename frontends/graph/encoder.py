"""The encoder in the graph: a function that reads sources whole and leaves their keys and values for the decoder.

Encoder layer l keeps its keys and values in layer l of the source's pages, as attention in a step does. When the last
layer is done, the decoder's layer l has its cross-attention's keys and values of all rows written over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks
    from llmc.frontends.graph.inputs import Inputs


def keep_for_crossing(outer: Blocks, x: Any, inputs: Inputs, kv_dtype: str) -> list[Any]:
    """What the encoder gives for all rows (M, C) -> a zero (1,) for each of the decoder's layers, of its writing."""
    attention = outer.spec.attention
    kept = []
    for number in range(outer.spec.sizes.layers):
        layer = outer.inside(f"layers.{number}.")
        rows = layer.concat([layer.linear(x, "cross_k"), layer.linear(x, "cross_v")])
        kv = outer.builder.emit(relax.TupleGetItem(inputs.kv, number))
        zero = layer.op(
            "store_kv", rows, kv, inputs.seqs, inputs.slots, inputs.page_indptr, inputs.page_ids[0],
            kv_heads=attention.kv_heads, head_dim=attention.head_dim, kv_dtype=kv_dtype,
        )  # fmt: skip
        kept.append(zero)
    return kept
