"""K and V of a step's rows into the pages of their sequences."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import KINDS, PAGE
from llmc.targets.arguments import arguments
from llmc.targets.attention.kv_pages import Pages
from llmc.targets.attention.online_softmax import pages_of
from llmc.targets.rows.rows import PARALLEL_ROWS
from llmc.targets.target import Target
from llmc.targets.vector import i32


def store_kv(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """rows (M, 2G D), kv pages, seqs, slots (M,), page_indptr (S + 1,), page_ids (P,) -> (1,), a zero."""
    groups, kind = int(attrs["kv_heads"]), str(attrs["kv_dtype"])
    dtypes = ["float32", str(KINDS[kind].dtype), *["int32"] * 5]
    with IRBuilder() as builder, T.prim_func():
        kv = pages_of(target, kind, int(attrs["head_dim"]))
        given, kv.buffer, seqs, slots, indptr, ids, out = arguments(dtypes, shapes)
        write_rows(kv, given, seqs, slots, indptr, ids, 0, groups)
        T.buffer_store(out, i32(0), [0])
    return builder.get()


def write_rows(kv: Pages, qkv: Any, seqs: Any, slots: Any, indptr: Any, ids: Any, heads: int, groups: int) -> None:
    """K and V of every row of qkv (M, (H + 2G) D)."""

    def write(row: Any) -> None:
        page = ids[indptr[seqs[row]] + T.floordiv(slots[row], PAGE)]
        kv.write(qkv, page, slots[row], row, heads, groups)

    rows = qkv.shape[0]
    with T.If(rows < PARALLEL_ROWS):
        with T.Then(), T.serial(0, rows) as row:
            write(row)
        with T.Else(), T.parallel(0, rows) as row:
            write(row)
