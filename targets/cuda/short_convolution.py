"""Short convolutions on CUDA: a launch writes what pages keep of the step's rows, another sums (compiler/meaning)."""

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

        def kept(row: Any, slot: Any, channel: Any) -> list[Any]:
            page, span = ids[indptr[seqs[row]] + T.floordiv(slot, PAGE)], T.floordiv(channel, width)
            inside = T.floormod(slot, PAGE) * width + T.floormod(channel, width)
            return [page, T.floordiv(span, heads), T.floormod(span, heads), inside]

        grid = {"blockIdx.x": rows, "blockIdx.y": -(-channels // THREADS), "threadIdx.x": THREADS}
        with launch(grid) as (row, block, thread):
            channel = block * THREADS + thread
            with T.If(channel < channels), T.Then():
                product = bcx[row, first + channel] * bcx[row, 2 * hidden + first + channel]
                T.buffer_store(kv, pages.store(product), kept(row, slots[row], channel))
        with launch(grid) as (row, block, thread):
            channel = block * THREADS + thread
            with T.If(channel < channels), T.Then():
                total = local((1,))
                T.buffer_store(total, f32(0), [0])
                for back in reversed(range(size)):
                    slot = slots[row] - back
                    with T.If(slot >= 0), T.Then():
                        found = pages.load(kv[tuple(kept(row, slot, channel))])
                        T.buffer_store(total, fma(taps[size - 1 - back, first + channel], found, total[0]), [0])
                T.buffer_store(out, bcx[row, hidden + first + channel] * total[0], [row, channel])
    return builder.get()
