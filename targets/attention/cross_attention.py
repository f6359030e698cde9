"""Attention of a step's rows to the sources of their sequences, whose K and V are in pages already."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import KINDS
from llmc.targets.arguments import arguments
from llmc.targets.attention.online_softmax import pages_of
from llmc.targets.attention.row_blocks import attend
from llmc.targets.attention.scoring import Scoring
from llmc.targets.attention.sight import Places
from llmc.targets.target import Target


def cross_attention(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """q (M, H D), kv, seqs (M,), source_lengths (S,), source_indptr (S + 1,), source_ids (Q,) -> (M, H D)."""
    heads, groups, size = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    kind = str(attrs["kv_dtype"])
    dtypes = ["float32", str(KINDS[kind].dtype), *["int32"] * 4, "float32"]
    with IRBuilder() as builder, T.prim_func():
        kv = pages_of(target, kind, size)
        q, kv.buffer, seqs, lengths, indptr, ids, out = arguments(dtypes, shapes)

        def last(row: Any) -> Any:
            return lengths[seqs[row]] - 1

        places = Places(seqs, last, last, indptr, ids, one_end=True)
        attend(target, kv, q, out, places, heads, groups, Scoring(float(attrs["scale"])))
    return builder.get()
