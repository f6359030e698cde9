"""Keys out of whole pages and back into them on CUDA, for keys that are turned where they lie."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.arguments import arguments
from llmc.targets.cuda.kv_kind import Token
from llmc.targets.cuda.kv_pages import KINDS
from llmc.targets.cuda.launch import i32, launch, shared, strided
from llmc.targets.cuda.rotation import rotate
from llmc.targets.cuda.target import CudaTarget

THREADS = 128


def load_keys(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """kv pages, page_ids (n,) -> K of their tokens (16 n, G D)."""
    groups, size, pages = int(attrs["kv_heads"]), int(attrs["head_dim"]), KINDS[str(attrs["kv_dtype"])]
    with IRBuilder() as builder, T.prim_func():
        kv, ids, out = arguments([pages.dtype, "int32", "float32"], shapes)
        with launch({"blockIdx.x": shapes[1][0], "blockIdx.y": groups, "threadIdx.x": THREADS}) as (
            place,
            head,
            thread,
        ):
            rotated = shared((PAGE * size,)) if pages.rotated else None

            def one(i: Any) -> None:
                step, token = T.floordiv(i, PAGE), T.floormod(i, PAGE)
                for e, number in enumerate(pages.keys(Token(kv, ids[place], head, token, size))(step)):
                    d = step * pages.unit + e
                    with T.If(d < size), T.Then():
                        if rotated is None:
                            T.buffer_store(out, number, [place * PAGE + token, head * size + d])
                        else:
                            T.buffer_store(rotated, number, [token * size + d])

            def write(i: Any) -> None:
                token, d = T.floordiv(i, size), T.floormod(i, size)
                assert rotated is not None
                T.buffer_store(out, rotated[i], [place * PAGE + token, head * size + d])

            strided(-(-size // pages.unit) * PAGE, thread, THREADS, one)
            if rotated is not None:
                rotate(rotated, PAGE * size, size, thread, THREADS)
                strided(PAGE * size, thread, THREADS, write)
    return builder.get()


def store_keys(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """rows (16 n, G D), kv pages, from_ids, to_ids (n,) -> (1,), a zero: pages copied, but K, which is rows.

    As on CPUs: no page is both read, at another place of the lists, and written.
    """
    groups, size, pages = int(attrs["kv_heads"]), int(attrs["head_dim"]), KINDS[str(attrs["kv_dtype"])]
    side, first = pages.beyond_keys(size)
    with IRBuilder() as builder, T.prim_func():
        rows, kv, from_ids, to_ids, out = arguments(["float32", pages.dtype, *["int32"] * 3], shapes)
        grid = {"blockIdx.x": shapes[2][0], "blockIdx.y": groups, "threadIdx.x": THREADS}
        with launch(grid) as (place, head, thread):
            to = to_ids[place]

            def copy(i: Any) -> None:
                T.buffer_store(kv, kv[from_ids[place], side, head, first + i], [to, side, head, first + i])

            def number(token: Any, d: Any) -> Any:
                return rows[place * PAGE + token, head * size + d]

            strided(int(shapes[1][3]) - first, thread, THREADS, copy)
            pages.write_keys(Token(kv, to, head, None, size), number, thread, THREADS)
            with T.If(tirx.all(thread == 0, place == 0, head == 0)), T.Then():
                T.buffer_store(out, i32(0), [0])
    return builder.get()


def copy_pages(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """kv pages, from_ids, to_ids (n,) -> (1,), a zero."""
    _, sides, heads, room = (int(size) if axis else 0 for axis, size in enumerate(shapes[0]))
    with IRBuilder() as builder, T.prim_func():
        kv, from_ids, to_ids, out = arguments([KINDS[str(attrs["kv_dtype"])].dtype, *["int32"] * 3], shapes)
        grid = {"blockIdx.x": shapes[1][0], "blockIdx.y": sides * heads, "threadIdx.x": THREADS}
        with launch(grid) as (place, part, thread):
            side, head = T.floordiv(part, heads), T.floormod(part, heads)

            def copy(i: Any) -> None:
                T.buffer_store(kv, kv[from_ids[place], side, head, i], [to_ids[place], side, head, i])

            strided(room, thread, THREADS, copy)
            with T.If(tirx.all(thread == 0, place == 0, part == 0)), T.Then():
                T.buffer_store(out, i32(0), [0])
    return builder.get()
