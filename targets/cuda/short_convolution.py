"""Short convolutions on CUDA, in one launch: what is of the step's own rows is computed again where it is wanted.

Pages are those of compiler/meaning/convolution.py.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.arguments import arguments
from llmc.targets.cuda.elementwise import THREADS
from llmc.targets.cuda.kv_pages import KINDS, PlainPages
from llmc.targets.cuda.launch import f32, fma, launch, local
from llmc.targets.cuda.target import CudaTarget


def short_convolution(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """bcx (M, 3D), taps (L, D), kv pages, seqs, slots (M,), page_indptr (S + 1,), page_ids (P,) -> (M, N)."""
    pages, first = KINDS[str(attrs["kv_dtype"])], int(attrs["first"])
    assert isinstance(pages, PlainPages)
    rows, channels = shapes[-1][0], int(shapes[-1][1])
    size, hidden = (int(each) for each in shapes[1])
    heads, width = int(shapes[2][2]), int(shapes[2][3]) // PAGE
    with IRBuilder() as builder, T.prim_func():
        dtypes = ["float32", "float32", pages.dtype, *["int32"] * 4, "float32"]
        bcx, taps, kv, seqs, slots, indptr, ids, out = arguments(dtypes, shapes)

        grid = {"blockIdx.x": rows, "blockIdx.y": -(-channels // THREADS), "threadIdx.x": THREADS}
        with launch(grid) as (row, block, thread):
            channel = block * THREADS + thread
            span, inside = T.floordiv(channel, width), T.floormod(channel, width)

            def kept(slot: Any) -> list[Any]:
                page, place = ids[indptr[seqs[row]] + T.floordiv(slot, PAGE)], T.floormod(slot, PAGE) * width
                return [page, T.floordiv(span, heads), T.floormod(span, heads), place + inside]

            def product(of: Any) -> Any:
                """Of a row, as pages keep it."""
                return pages.store(bcx[of, first + channel] * bcx[of, 2 * hidden + first + channel])

            with T.If(channel < channels), T.Then():
                T.buffer_store(kv, product(row), kept(slots[row]))
                total, found = local((1,)), local((1,), pages.dtype)
                T.buffer_store(total, f32(0), [0])
                for back in reversed(range(size)):
                    slot, of = slots[row] - back, T.max(row - back, 0)
                    here = tirx.all(row >= back, seqs[of] == seqs[row], slots[of] == slot)
                    with T.If(slot >= 0), T.Then():
                        with T.If(here):
                            with T.Then():
                                T.buffer_store(found, product(of), [0])
                            with T.Else():
                                T.buffer_store(found, kv[tuple(kept(slot))], [0])
                        tap = taps[size - 1 - back, first + channel]
                        T.buffer_store(total, fma(tap, pages.load(found[0]), total[0]), [0])
                T.buffer_store(out, bcx[row, hidden + first + channel] * total[0], [row, channel])
    return builder.get()
