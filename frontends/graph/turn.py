"""Keys in the cache turned to other positions: a function for texts that slide (docs/endless.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx

from llmc.compiler.kv_pages import PAGE
from llmc.compiler.spec import ModelSpec, cached_heads, layer_groups
from llmc.frontends.graph.inputs import cache_of
from llmc.frontends.graph.places import rope_tables

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks


@dataclass(frozen=True)
class Moves:
    """Symbolic inputs: pages of layers that see everything, and where they are written with their keys turned."""

    by: Any  # (16 n,) int32, positions forward (below 0: back) for each token
    from_ids: Any  # (n,) int32
    to_ids: Any  # (n,) int32
    kv: Any

    def all(self) -> list[Any]:
        """In the order of the compiled function."""
        return [self.by, self.from_ids, self.to_ids, self.kv]


def moves_of(spec: ModelSpec, kv_dtype: str) -> Moves:
    """Fresh inputs."""
    pages = tirx.Var("moved", "int64")
    sizes = (("by", pages * PAGE), ("from_ids", pages), ("to_ids", pages))
    by, from_ids, to_ids = (relax.Var(name, relax.TensorType((size,), "int32")) for name, size in sizes)
    return Moves(by, from_ids, to_ids, cache_of(spec, kv_dtype))


def turn(stack: Blocks, moves: Moves, kv_dtype: str) -> Any:
    """A zero (1,) for each layer, of its writing; layers without rope are copied as they are."""
    spec = stack.spec
    heads, size = cached_heads(spec)
    sizes: dict[str, Any] = {"kv_heads": heads, "head_dim": size, "kv_dtype": kv_dtype}
    rope = {"rotated_heads": heads, "head_dim": size, "first": spec.latent.kv_rank, "layout": spec.position.layout}
    layers = layer_groups(spec)[0].layers
    # What is in the cache has its magnitude already.
    tables = rope_tables(stack, layers, moves.by, magnified=False)
    written = []
    for layer in layers:
        kv = stack.builder.emit(relax.TupleGetItem(moves.kv, layer))
        if tables[layer] is None:
            written.append(stack.op("copy_pages", kv, moves.from_ids, moves.to_ids, kv_dtype=kv_dtype))
            continue
        keys = stack.op("rope", stack.op("load_keys", kv, moves.from_ids, **sizes), tables[layer], **rope)
        written.append(stack.op("store_keys", keys, kv, moves.from_ids, moves.to_ids, **sizes))
    return relax.Tuple(written)
