"""What the compiled functions of a model take besides weights, and what attention of one layer sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from llmc.compiler import kv_pages
from llmc.compiler.spec import ModelSpec, cached_heads, layer_groups, pool_layers


@dataclass(frozen=True)
class Inputs:
    """Symbolic inputs of a step; M rows, S sequences, P pages listed, R rows that want logits, Q pages of sources."""

    tokens: Any  # (M,) int32
    positions: Any  # (M,) int32, for RoPE
    seqs: Any  # (M,) int32, row -> sequence of this step
    slots: Any  # (M,) int32, row -> place in its sequence's KV
    holes: Any  # (S, 2) int32, slots that no row of a sequence sees: the first, and the one after the last
    page_indptr: Any  # (S + 1,) int32
    page_ids: tuple[Any, ...]  # (P,) int32 for each group of layers
    logit_rows: Any  # (R,) int32
    kv: Any  # tuple of one (pages, *page_shape) a layer, see kv_pages.py
    sources: tuple[Any, ...] = ()  # what each sequence's text is an answer to: lengths (S,), indptr (S + 1,), ids (Q,)

    def all(self) -> list[Any]:
        """In the order of the compiled function."""
        return [self.tokens, self.positions, *self.places(), self.logit_rows, *self.sources, self.kv]

    def places(self) -> list[Any]:
        """Those that say where rows stand in the cache."""
        return [self.seqs, self.slots, self.holes, self.page_indptr, *self.page_ids]


@dataclass(frozen=True)
class Sight:
    """What attention of a layer sees, and how it is told of places."""

    layer: int
    table: Any  # (M, R) of rope, or None
    bias: Any  # (H, 2 W + 1) by distance, or None
    pools: tuple[Any, ...]  # tensors of pages: one, or of a convolution as many as it wants
    page_ids: Any  # (P,) int32, of the layer's group
    inputs: Inputs
    kv_dtype: str
    causal: bool

    @property
    def kv(self) -> Any:
        """The pages of its keys and values."""
        return self.pools[0]

    def pages(self) -> tuple[Any, ...]:
        """What says which pages the keys and values that a row sees lie in."""
        inputs = self.inputs
        return inputs.seqs, inputs.slots, inputs.holes, inputs.page_indptr, self.page_ids


def inputs_of(spec: ModelSpec, kv_dtype: str, sources: bool) -> Inputs:
    """Fresh inputs of a function; `sources`: its sequences have texts that they are answers to."""
    names = ("rows", "indptr", "pages", "wanted", "sequences", "source_indptr", "source_pages")
    sizes = {name: tirx.Var(name, "int64") for name in names}

    def index(name: str, size: str, *more: int) -> Any:
        return relax.Var(name, relax.TensorType((sizes[size], *more), "int32"))

    listed = (("source_lengths", "sequences"), ("source_indptr", "source_indptr"), ("source_ids", "source_pages"))
    return Inputs(
        index("tokens", "rows"), index("positions", "rows"), index("seqs", "rows"), index("slots", "rows"),
        index("holes", "sequences", 2), index("page_indptr", "indptr"),
        tuple(index(f"page_ids_{number}", "pages") for number in range(len(layer_groups(spec)))),
        index("logit_rows", "wanted"), cache_of(spec, kv_dtype),
        tuple(index(*pair) for pair in listed) if sources else (),
    )  # fmt: skip


def cache_of(spec: ModelSpec, kv_dtype: str) -> Any:
    """The pages of all layers: a tuple of one tensor a layer (`pools_of`), as many in it as its group has."""
    page = kv_pages.page_shape(kv_dtype, *cached_heads(spec))
    dtype, groups = str(kv_pages.KINDS[kv_dtype].dtype), layer_groups(spec)
    sizes = {layer: tirx.Var(f"pool_{n}", "int64") for n, group in enumerate(groups) for layer in group.layers}
    pages = [relax.TensorType((sizes[layer], *page), dtype) for layer in range(pool_layers(spec))]
    return relax.Var("kv", relax.TupleType(pages))


def group_of(spec: ModelSpec, layer: int) -> int:
    """The number of the group that a layer is of."""
    return next(number for number, group in enumerate(layer_groups(spec)) if layer in group.layers)
