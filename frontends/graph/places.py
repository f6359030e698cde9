"""How a model is told where its tokens stand: vectors added to the embedding, rope's tables, biases by distance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tvm import relax

from llmc.compiler.spec import pools_of
from llmc.frontends.graph.inputs import Inputs, Sight, group_of
from llmc.frontends.graph.rope import rope_of
from llmc.frontends.graph.sinusoid import sinusoidal_frequencies

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks


def add_positions(stack: Blocks, x: Any, inputs: Inputs) -> Any:
    """Embeddings (M, C) -> (M, C), with the vectors of their places where the model adds any."""
    position = stack.spec.position
    if position.kind == "learned":
        return stack.add(x, stack.op("embedding", inputs.positions, stack.weights[f"{stack.prefix}positions"]))
    if position.kind == "sinusoidal":
        frequencies = relax.const(sinusoidal_frequencies(stack.spec))
        return stack.add(x, stack.op("sinusoid", inputs.positions, frequencies, offset=position.offset))
    return x


def sights(stack: Blocks, layers: Iterable[int], inputs: Inputs, kv_dtype: str, causal: bool) -> Iterator[Sight]:
    """What layers of a stack see: the decoder's, or with the prefix "encoder." the encoder's."""
    spec, emit = stack.spec, stack.builder.emit
    layers = list(layers)
    tables = rope_tables(stack, layers, inputs.positions)
    shared = _bias(stack, "relative_bias", causal)
    for number in layers:
        bias = _bias(stack, f"layers.{number}.relative_bias", causal) if shared is None else shared
        pools = tuple(emit(relax.TupleGetItem(inputs.kv, pool)) for pool in pools_of(spec, number))
        ids = inputs.page_ids[group_of(spec, number)]
        yield Sight(number, tables[number], bias, pools, ids, inputs, kv_dtype, causal)


def rope_tables(stack: Blocks, layers: Iterable[int], positions: Any, magnified: bool = True) -> dict[int, Any]:
    """(M, R) of positions (M,) for each layer, one for all that share a rope; None for a layer without."""
    spec = stack.spec
    size = spec.latent.rope_dim or spec.position.rotary_dim or spec.attention.head_dim
    ropes = {layer: rope_of(spec, layer) for layer in layers}
    tables = {
        rope: stack.op(
            "rope_table", positions, relax.const(rope.frequencies(size, spec.sizes.context)),
            magnitude=rope.magnitude if magnified else 1.0,
        )
        for rope in dict.fromkeys(ropes.values())
        if rope is not None
    }  # fmt: skip
    return {layer: None if rope is None else tables[rope] for layer, rope in ropes.items()}


def _bias(stack: Blocks, name: str, causal: bool) -> Any:
    """(H, 2 W + 1) of a table of buckets, None where there is none."""
    table = stack.weights.get(stack.prefix + name)
    if table is None:
        return None
    return stack.op("relative_bias", table, distance=stack.spec.position.distance, both=int(not causal))
