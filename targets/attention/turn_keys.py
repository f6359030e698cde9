"""Keys out of whole pages and back into them, for keys that are turned where they lie (frontends/graph/turn.py)."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import KINDS, PAGE
from llmc.targets.arguments import arguments
from llmc.targets.attention.online_softmax import pages_of
from llmc.targets.rows.rows import columns
from llmc.targets.target import Target
from llmc.targets.vector import i32, lanes


def load_keys(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """kv pages, page_ids (n,) -> K of their tokens (16 n, G D)."""
    groups, size, kind = int(attrs["kv_heads"]), int(attrs["head_dim"]), str(attrs["kv_dtype"])
    with IRBuilder() as builder, T.prim_func():
        kv = pages_of(target, kind, size)
        kv.buffer, ids, out = arguments([str(KINDS[kind].dtype), "int32", "float32"], shapes)
        with T.parallel(0, shapes[1][0] * groups) as task:
            place, head = T.floordiv(task, groups), T.floormod(task, groups)
            found = kv.keys(ids[place], head)
            with T.serial(0, PAGE) as token, T.serial(0, size) as d:
                T.buffer_store(out, found[d * PAGE + token], [place * PAGE + token, head * size + d])
    return builder.get()


def store_keys(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """rows (16 n, G D), kv pages, from_ids, to_ids (n,) -> (1,), a zero: pages copied, but K, which is rows."""
    groups, size, kind = int(attrs["kv_heads"]), int(attrs["head_dim"]), str(attrs["kv_dtype"])
    with IRBuilder() as builder, T.prim_func():
        kv = pages_of(target, kind, size)
        rows, kv.buffer, from_ids, to_ids, out = arguments(["float32", str(KINDS[kind].dtype), *["int32"] * 3], shapes)
        with T.parallel(0, shapes[2][0]) as place:
            _copy(kv.buffer, from_ids[place], to_ids[place])
            with T.serial(0, PAGE) as token, T.serial(0, groups) as head:
                kv.write_key(rows, place * PAGE + token, head * size, to_ids[place], head, token)
        T.buffer_store(out, i32(0), [0])
    return builder.get()


def copy_pages(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """kv pages, from_ids, to_ids (n,) -> (1,), a zero."""
    dtype = str(KINDS[str(attrs["kv_dtype"])].dtype)
    with IRBuilder() as builder, T.prim_func():
        pages, from_ids, to_ids, out = arguments([dtype, *["int32"] * 3], shapes)
        with T.parallel(0, shapes[1][0]) as place:
            _copy(pages, from_ids[place], to_ids[place])
        T.buffer_store(out, i32(0), [0])
    return builder.get()


def _copy(pages: Any, source: Any, to: Any) -> None:
    """A whole page, unless it is copied to itself."""
    _, sides, heads, width = (int(size) if axis else 0 for axis, size in enumerate(pages.shape))
    with T.If(source != to), T.Then(), T.serial(0, sides) as side, T.serial(0, heads) as head:
        columns(
            width,
            lambda c: T.buffer_store(pages, pages[source, side, head, lanes(c)], [to, side, head, lanes(c)]),
            lambda c: T.buffer_store(pages, pages[source, side, head, c], [to, side, head, c]),
        )


KERNELS: dict[str, Any] = {"load_keys": load_keys, "store_keys": store_keys, "copy_pages": copy_pages}
