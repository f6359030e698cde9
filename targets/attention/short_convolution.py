"""Short convolutions on CPUs: each channel sums what its sequence's pages keep of the last few tokens.

Pages are those of compiler/meaning/convolution.py. Threads share spans of channels: of each, what is kept of a row is
written before it and the rows after it are summed.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import KINDS, PAGE
from llmc.targets.arguments import arguments
from llmc.targets.rows.rows import PARALLEL_ROWS
from llmc.targets.target import Target
from llmc.targets.vector import LANES, even_bf16, f32, fma, lanes, registers, splat, widen_bf16

# How sixteen numbers are written to pages of a kind, and read.
_WRITE = {"f32": lambda x: x, "bf16": even_bf16}
_READ = {"f32": lambda x: x, "bf16": widen_bf16}


def short_convolution(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """bcx (M, 3D), taps (L, D), kv pages, seqs, slots (M,), page_indptr (S + 1,), page_ids (P,) -> (M, N)."""
    kind = str(attrs["kv_dtype"])
    with IRBuilder() as builder, T.prim_func():
        dtypes = ["float32", "float32", str(KINDS[kind].dtype), *["int32"] * 4, "float32"]
        made = _Convolution(arguments(dtypes, shapes), kind, int(attrs["first"]))
        rows = shapes[0][0]
        with T.If(rows < PARALLEL_ROWS):
            with T.Then(), T.serial(0, made.spans) as span:
                made.run(span)
            with T.Else(), T.parallel(0, made.spans) as span:
                made.run(span)
    return builder.get()


class _Convolution:
    """A span of channels is what pages have in the place of a kv head's keys, or of its values."""

    def __init__(self, buffers: list[Any], kind: str, first: int) -> None:
        self.bcx, self.taps, self.kv, self.seqs, self.slots, self.indptr, self.ids, self.out = buffers
        self.kind, self.first = kind, first
        self.rows, self.channels = self.out.shape[0], int(self.out.shape[1])
        self.size, self.hidden = (int(size) for size in self.taps.shape)
        self.heads, self.width = int(self.kv.shape[2]), int(self.kv.shape[3]) // PAGE
        self.spans = -(-self.channels // self.width)

    def run(self, span: Any) -> None:
        """All rows of a span, in order."""
        vectors = T.floordiv(T.min(self.width, self.channels - span * self.width), LANES)
        with T.serial(0, self.rows) as row:
            pages = registers((self.size,), "int32")
            for back in range(self.size):
                slot = T.max(self.slots[row] - back, 0)
                T.buffer_store(pages, self.ids[self.indptr[self.seqs[row]] + T.floordiv(slot, PAGE)], [back])
            with T.serial(0, vectors) as vector:
                here = self._kept(pages[0], self.slots[row], span, vector)
                T.buffer_store(self.kv, _WRITE[self.kind](self._product(row, span, vector)), here)
                self._sum(row, span, vector, pages)

    def _kept(self, page: Any, slot: Any, span: Any, vector: Any) -> list[Any]:
        """Where sixteen channels of a token are in its page."""
        inside = T.floormod(slot, PAGE) * self.width + vector * LANES
        return [page, T.floordiv(span, self.heads), T.floormod(span, self.heads), lanes(inside)]

    def _product(self, row: Any, span: Any, vector: Any) -> Any:
        channel = self.first + span * self.width + vector * LANES
        return self.bcx[row, lanes(channel)] * self.bcx[row, lanes(2 * self.hidden + channel)]

    def _sum(self, row: Any, span: Any, vector: Any, pages: Any) -> None:
        here = span * self.width + vector * LANES
        total, place = registers((LANES,), "float32"), lanes(0)
        T.buffer_store(total, splat(f32(0)), [place])
        for back in reversed(range(self.size)):
            slot = self.slots[row] - back
            with T.If(slot >= 0), T.Then():
                kept = self.kv[tuple(self._kept(pages[back], slot, span, vector))]
                tap = self.taps[self.size - 1 - back, lanes(self.first + here)]
                T.buffer_store(total, fma(tap, _READ[self.kind](kept), total[place]), [place])
        gate = self.bcx[row, lanes(self.hidden + self.first + here)]
        T.buffer_store(self.out, gate * total[place], [row, lanes(here)])
