"""What the compiled functions of a model take besides weights, and what attention of one layer sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from llmc.compiler import kv_pages
from llmc.compiler.spec import ModelSpec, cached_heads, pool_layers


@dataclass(frozen=True)
class Inputs:
    """Symbolic inputs of a step; M rows, S sequences, P pages listed, R rows that want logits, Q pages of sources."""

    tokens: Any  # (M,) int32
    positions: Any  # (M,) int32, for RoPE
    seqs: Any  # (M,) int32, row -> sequence of this step
    slots: Any  # (M,) int32, row -> place in its sequence's KV
    page_indptr: Any  # (S + 1,) int32
    page_ids: Any  # (P,) int32
    logit_rows: Any  # (R,) int32
    kv: Any  # tuple of one (pages, *page_shape) a layer, see kv_pages.py
    sources: tuple[Any, ...] = ()  # what each sequence's text is an answer to: lengths (S,), indptr (S + 1,), ids (Q,)

    def all(self) -> list[Any]:
        """In the order of the compiled function."""
        return [
            self.tokens, self.positions, self.seqs, self.slots,
            self.page_indptr, self.page_ids, self.logit_rows, *self.sources, self.kv,
        ]  # fmt: skip

    def pages(self) -> tuple[Any, ...]:
        """What says which page a row's keys and values lie in."""
        return self.seqs, self.slots, self.page_indptr, self.page_ids


@dataclass(frozen=True)
class Sight:
    """What attention of a layer sees, and how it is told of places."""

    layer: int
    table: Any  # (M, R) of rope, or None
    bias: Any  # (H, 2 W + 1) by distance, or None
    kv: Any
    inputs: Inputs
    kv_dtype: str
    causal: bool


def inputs_of(spec: ModelSpec, kv_dtype: str, sources: bool) -> Inputs:
    """Fresh inputs of a function; `sources`: its sequences have texts that they are answers to."""
    names = ("rows", "indptr", "pages", "wanted", "pool", "sequences", "source_indptr", "source_pages")
    sizes = {name: tirx.Var(name, "int64") for name in names}

    def index(name: str, size: str) -> Any:
        return relax.Var(name, relax.TensorType((sizes[size],), "int32"))

    page = kv_pages.page_shape(kv_dtype, *cached_heads(spec))
    layer = relax.TensorType((sizes["pool"], *page), str(kv_pages.KINDS[kv_dtype].dtype))
    listed = (("source_lengths", "sequences"), ("source_indptr", "source_indptr"), ("source_ids", "source_pages"))
    return Inputs(
        index("tokens", "rows"), index("positions", "rows"), index("seqs", "rows"), index("slots", "rows"),
        index("page_indptr", "indptr"), index("page_ids", "pages"), index("logit_rows", "wanted"),
        relax.Var("kv", relax.TupleType([layer] * pool_layers(spec))),
        tuple(index(*pair) for pair in listed) if sources else (),
    )  # fmt: skip
