"""Paged attention: one kernel for prefill, chunks and decode, GQA-aware.

Which rows share a load of K and V is found in row_blocks.py; what is done with a page is in online_softmax.py.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import KINDS
from llmc.compiler.meaning.attending import bias_slopes
from llmc.targets.arguments import arguments
from llmc.targets.attention.online_softmax import pages_of
from llmc.targets.attention.row_blocks import attend
from llmc.targets.attention.scoring import Scoring
from llmc.targets.attention.sight import Places
from llmc.targets.attention.store_kv import write_rows
from llmc.targets.target import Target
from llmc.targets.vector import i32, registers


def attention(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), kv, seqs, slots (M,), holes (S, 2), page_indptr (S + 1,), page_ids (P,) -> (M, H D)."""
    return _attention(target, shapes, attrs)


def attention_with_sinks(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """As attention, sinks (H,) -> (M, H D)."""
    return _attention(target, shapes, attrs, "sinks")


def attention_by_distance(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """As attention, bias (H, 2W + 1) -> (M, H D)."""
    return _attention(target, shapes, {"bias": "none", **attrs}, "biases")


def _attention(target: Target, shapes: list[Any], attrs: dict[str, Any], *more: str) -> tirx.PrimFunc:
    """`more` names what of Scoring the operands after page_ids are."""
    heads, groups, size = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    scale, bias = float(attrs["scale"]), str(attrs["bias"])
    slopes = () if bias == "none" else tuple(map(float, bias_slopes(bias, heads, scale)))
    causal, window, soft_cap = bool(attrs["causal"]), int(attrs["window"]), float(attrs["soft_cap"])
    kind = str(attrs["kv_dtype"])
    dtypes = ["float32", str(KINDS[kind].dtype), *["int32"] * 5, *["float32"] * len(more), "float32"]
    with IRBuilder() as builder, T.prim_func():
        kv = pages_of(target, kind, size)
        qkv, kv.buffer, seqs, slots, holes, indptr, ids, *given, out = arguments(dtypes, shapes)
        write_rows(kv, qkv, seqs, slots, indptr, ids, heads, groups)
        scoring = Scoring(scale, causal, soft_cap, slopes, **dict(zip(more, given, strict=True)))
        rows = shapes[0][0]

        def end_of(row: Any) -> Any:
            return slots[row] if causal else _end(seqs, slots, rows, row)

        places = Places(seqs, lambda row: slots[row], end_of, indptr, ids, window, holes, one_end=not causal)
        attend(target, kv, qkv, out, places, heads, groups, scoring)
    return builder.get()


def _end(seqs: Any, slots: Any, rows: Any, row: Any) -> Any:
    """The last slot that the sequence of a row has in this step."""
    end = registers((1,), "int32")
    T.buffer_store(end, slots[row], [0])
    with T.serial(0, rows) as other:
        T.buffer_store(end, T.max(end[0], T.Select(seqs[other] == seqs[row], slots[other], i32(0))), [0])
    return end[0]
