"""A short convolution in the graph, in place of attention: it keeps of tokens, in pages, what it sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks
    from llmc.frontends.graph.inputs import Sight


def short_convolution(blocks: Blocks, x: Any, sight: Sight) -> Any:
    """(M, C) -> (M, C)."""
    bcx, taps = blocks.linear(x, "conv_in"), blocks.weights[f"{blocks.prefix}conv"]
    parts: list[Any] = []
    first = 0
    for kv in sight.pools:
        inputs = sight.inputs
        read = (inputs.seqs, inputs.slots, inputs.page_indptr, sight.page_ids)
        parts.append(blocks.op("short_convolution", bcx, taps, kv, *read, first=first, kv_dtype=sight.kv_dtype))
        first += int(parts[-1].ty.shape[1])
    return blocks.linear(parts[0] if len(parts) == 1 else blocks.concat(parts), "conv_out")
