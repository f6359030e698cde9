"""Keys out of whole pages and back into them on CUDA, for keys that are turned where they lie."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.arguments import arguments
from llmc.targets.cuda.kv_pages import pages_of, zero
from llmc.targets.cuda.launch import i32, launch, strided
from llmc.targets.cuda.target import CudaTarget

THREADS = 128


def load_keys(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """kv pages, page_ids (n,) -> K of their tokens (16 n, G D)."""
    groups, size, pages = int(attrs["kv_heads"]), int(attrs["head_dim"]), pages_of(str(attrs["kv_dtype"]))
    with IRBuilder() as builder, T.prim_func():
        kv, ids, out = arguments([pages.dtype, "int32", "float32"], shapes)
        with launch({"blockIdx.x": shapes[1][0], "blockIdx.y": groups, "threadIdx.x": THREADS}) as (
            place,
            head,
            thread,
        ):

            def one(i: Any) -> None:
                d, token = T.floordiv(i, PAGE), T.floormod(i, PAGE)
                number = pages.load(kv[ids[place], 0, head, pages.key(token, d, size)])
                T.buffer_store(out, number, [place * PAGE + token, head * size + d])

            strided(size * PAGE, thread, THREADS, one)
    return builder.get()


def store_keys(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """rows (16 n, G D), kv pages, from_ids, to_ids (n,) -> (1,), a zero: V copied, K out of rows.

    As on CPUs: no page is both read, at another place of the lists, and written.
    """
    groups, size, pages = int(attrs["kv_heads"]), int(attrs["head_dim"]), pages_of(str(attrs["kv_dtype"]))
    room = int(shapes[1][3])
    with IRBuilder() as builder, T.prim_func():
        rows, kv, from_ids, to_ids, out = arguments(["float32", pages.dtype, *["int32"] * 3], shapes)
        grid = {"blockIdx.x": shapes[2][0], "blockIdx.y": groups, "threadIdx.x": THREADS}
        with launch(grid) as (place, head, thread):
            to = to_ids[place]

            def copy(i: Any) -> None:
                T.buffer_store(kv, kv[from_ids[place], 1, head, i], [to, 1, head, i])

            def one(i: Any) -> None:
                d, token = T.floordiv(i, PAGE), T.floormod(i, PAGE)
                number = rows[place * PAGE + token, head * size + d]
                T.buffer_store(kv, pages.store(number), [to, 0, head, pages.key(token, d, size)])

            strided(room, thread, THREADS, copy)
            strided(size * PAGE, thread, THREADS, one)
            if room > size * PAGE:  # elements of an odd size lie in pairs
                with T.If(thread < PAGE), T.Then():
                    T.buffer_store(kv, zero(pages), [to, 0, head, pages.key(thread, size, size)])
            with T.If(tirx.all(thread == 0, place == 0, head == 0)), T.Then():
                T.buffer_store(out, i32(0), [0])
    return builder.get()
