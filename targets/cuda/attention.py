"""Attention over pages on CUDA: K and V of the step's rows written first, then every row by itself.

A block takes one row and one kv head: the query heads that share it share its loads. Slots come in chunks that begin at
multiples of their size; of each, threads compute scores, a slot a thread, and then add up values, an element a thread.
The greatest score so far and sums by it go from chunk to chunk (https://arxiv.org/abs/2205.14135 section 3.1).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import PAGE
from llmc.targets.arguments import arguments
from llmc.targets.cuda.elementwise import capped
from llmc.targets.cuda.kv_pages import Pages, pages_of, zero
from llmc.targets.cuda.launch import (
    added,
    barrier,
    f32,
    fill,
    greater,
    i32,
    launch,
    local,
    shared,
    strided,
    warp_reduce,
)  # fmt: skip
from llmc.targets.cuda.target import STATIC_SHARED_BYTES, WARP, CudaTarget

THREADS = CHUNK = 128  # a slot a thread
WARPS = THREADS // WARP
_LOWEST = -3.0e38  # of scores: below all, and a number, so that differences of it are numbers


def attention(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), kv pages, seqs, slots, holes, page_indptr, page_ids -> (M, H D)."""
    if attrs["bias"] != "none" or not attrs["causal"]:
        what = f"a bias by distance ({attrs['bias']})" if attrs["bias"] != "none" else "rows that see later ones"
        raise LlmcError(f"attention with {what}: no CUDA kernel yet (docs/cuda.md)")
    pages = pages_of(str(attrs["kv_dtype"]))
    heads, groups, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    if _shared_bytes(heads // groups, size) > STATIC_SHARED_BYTES:
        raise LlmcError(f"attention of {heads} heads of {size} over {groups}: no CUDA kernel holds so many at once yet")
    with IRBuilder() as builder, T.prim_func():
        dtypes = ["float32", pages.dtype, *["int32"] * 5, "float32"]
        qkv, kv, seqs, slots, holes, indptr, ids, out = arguments(dtypes, shapes)
        grid = {"blockIdx.x": shapes[0][0], "blockIdx.y": groups, "threadIdx.x": THREADS}
        with launch(grid) as (row, group, thread):
            page = ids[indptr[seqs[row]] + T.floordiv(slots[row], PAGE)]
            write(pages, qkv, kv, row, page, (heads, groups, size), group, T.floormod(slots[row], PAGE), thread)
        with launch(grid) as (row, group, thread):
            reads = _Row(pages, qkv, kv, row, group, thread, attrs)
            reads.where(slots[row], holes[seqs[row], 0], holes[seqs[row], 1], ids, indptr[seqs[row]])
            reads.mix(out)
    return builder.get()


def write(
    pages: Pages,
    rows: Any,
    kv: Any,
    row: Any,
    page: Any,
    sizes: tuple[int, int, int],
    group: Any,
    place: Any,
    thread: Any,
) -> None:
    """K and V of one kv head of a row into a page, by all threads of the block; sizes are H, G and D."""
    heads, groups, size = sizes

    def one(d: Any) -> None:
        for side, where in enumerate((pages.key, pages.value)):
            number = rows[row, (heads + side * groups + group) * size + d]
            T.buffer_store(kv, pages.store(number), [page, side, group, where(place, d, size)])

    strided(size, thread, THREADS, one)
    if size % 2 and pages.dtype == "uint16":  # elements lie in pairs
        with T.If(thread == 0), T.Then():
            T.buffer_store(kv, zero(pages), [page, 0, group, pages.key(place, size, size)])


def _shared_bytes(shared_heads: int, size: int) -> int:
    """What the arrays of `_Row` take: queries, weights, the greatest scores of warps, partial sums."""
    parts, wide = _division(size)
    return 4 * shared_heads * (size + CHUNK + 2 * WARPS + parts * min(size, wide))


def _division(size: int) -> tuple[int, int]:
    """(parts of a chunk's slots, elements side by side): how threads divide the values of a chunk."""
    return max(1, THREADS // size), min(size, THREADS)


class _Row:
    """One row's attention to the slots of one kv head."""

    def __init__(
        self, pages: Pages, qkv: Any, kv: Any, row: Any, group: Any, thread: Any, attrs: dict[str, Any]
    ) -> None:
        self.pages, self.kv, self.row, self.group, self.thread = pages, kv, row, group, thread
        self.size, self.shared_heads = int(attrs["head_dim"]), int(attrs["heads"]) // int(attrs["kv_heads"])
        self.scale, self.cap, self.window = float(attrs["scale"]), float(attrs["soft_cap"]), int(attrs["window"])
        self.parts, self.wide = _division(self.size)
        self.steps = -(-self.size // self.wide)  # elements of a thread
        self.queries = shared((self.shared_heads * self.size,))
        first = group * (self.shared_heads * self.size)
        strided(
            self.shared_heads * self.size, thread, THREADS,
            lambda i: T.buffer_store(self.queries, pages.query(qkv[row, first + i]), [i]),
        )  # fmt: skip

    def where(self, slot: Any, first: Any, after: Any, ids: Any, start: Any) -> None:
        """The row's slot, the hole of its sequence, and where its page table begins."""
        self.slot, self.first, self.after, self.ids, self.start = slot, first, after, ids, start

    def sees(self, slot: Any) -> Any:
        """Whether the row attends to a slot."""
        seen = tirx.all(slot <= self.slot, tirx.any(slot < self.first, slot >= self.after))
        return tirx.all(seen, slot > self.slot - self.window) if self.window else seen

    def page(self, slot: Any) -> Any:
        return self.ids[self.start + T.floordiv(slot, PAGE)]

    def mix(self, out: Any) -> None:
        """The mix of values into `out`."""
        heads = self.shared_heads
        self.scores, self.totals, self.tops = local((heads,)), local((heads,)), local((heads,))
        self.sums = local((heads * self.steps,))
        self.weights, self.reduced = shared((heads, CHUNK)), shared((heads, WARPS))
        fill(self.totals, f32(0))
        fill(self.tops, f32(_LOWEST))
        fill(self.sums, f32(0))
        begin = T.floordiv(T.max(self.slot - self.window + 1, 0), CHUNK) if self.window else i32(0)
        with T.serial(begin, T.floordiv(self.slot, CHUNK) + 1) as chunk:
            barrier()  # queries are there; the chunk before is done with
            self._score(chunk * CHUNK + self.thread)
            barrier()
            self._weigh()
            barrier()
            self._add_values(chunk * CHUNK)
        self._finish(out)

    def _score(self, slot: Any) -> None:
        """Scores of the thread's slot; the greatest of each warp to `reduced`."""
        fill(self.scores, f32(0))
        self.seen = local((1,), "int32")
        T.buffer_store(self.seen, T.Select(self.sees(slot), i32(1), i32(0)), [0])
        with T.If(self.seen[0] != 0), T.Then():
            page = self.page(slot)
            with T.serial(0, self.size) as d:
                at = self.pages.key(T.floormod(slot, PAGE), d, self.size)
                key = self._held(self.pages.load(self.kv[page, 0, self.group, at]))
                for head in range(self.shared_heads):
                    product = self.queries[head * self.size + d] * key
                    T.buffer_store(self.scores, self.scores[head] + product, [head])
        most = local((self.shared_heads,))
        for head in range(self.shared_heads):
            score = self.scores[head] * f32(self.scale)
            score = capped(score, self.cap) if self.cap else score
            T.buffer_store(self.scores, T.Select(self.seen[0] != 0, score, f32(_LOWEST)), [head])
            T.buffer_store(most, self.scores[head], [head])
            warp_reduce(most, head, greater)
        with T.If(T.floormod(self.thread, WARP) == 0), T.Then():
            for head in range(self.shared_heads):
                T.buffer_store(self.reduced, most[head], [head, T.floordiv(self.thread, WARP)])

    def _weigh(self) -> None:
        """Weights of the chunk's slots by the greatest score so far; what was summed before, by it too."""
        top = local((1,))
        for head in range(self.shared_heads):
            T.buffer_store(top, self.tops[head], [0])
            for warp in range(WARPS):
                T.buffer_store(top, T.max(top[0], self.reduced[head, warp]), [0])
            shrink = self._held(T.exp(self.tops[head] - top[0]))
            T.buffer_store(self.tops, top[0], [head])
            weight = self._held(T.Select(self.seen[0] != 0, T.exp(self.scores[head] - top[0]), f32(0)))
            T.buffer_store(self.weights, weight, [head, self.thread])
            T.buffer_store(self.totals, self.totals[head] * shrink + weight, [head])
            for step in range(self.steps):
                at = head * self.steps + step
                T.buffer_store(self.sums, self.sums[at] * shrink, [at])

    def _add_values(self, begin: Any) -> None:
        """Values of the chunk's slots, those of a part to each thread, times their weights."""
        part, own = T.floordiv(self.thread, self.wide), T.floormod(self.thread, self.wide)
        slots = -(-CHUNK // self.parts)
        with T.serial(0, slots) as step:
            place = step * self.parts + part
            inside = tirx.all(part < self.parts, place < CHUNK, self.sees(begin + place))
            with T.If(inside), T.Then():
                page, token = self.page(begin + place), T.floormod(begin + place, PAGE)
                for j in range(self.steps):
                    with T.If(own + j * self.wide < self.size), T.Then():
                        at = self.pages.value(token, own + j * self.wide, self.size)
                        value = self._held(self.pages.load(self.kv[page, 1, self.group, at]))
                        for head in range(self.shared_heads):
                            i = head * self.steps + j
                            T.buffer_store(self.sums, self.sums[i] + self.weights[head, place] * value, [i])

    def _finish(self, out: Any) -> None:
        """Sums of parts and of threads put together, divided, written."""
        part, own = T.floordiv(self.thread, self.wide), T.floormod(self.thread, self.wide)
        totals = shared((self.shared_heads, WARPS))
        for head in range(self.shared_heads):
            warp_reduce(self.totals, head, added)
        with T.If(T.floormod(self.thread, WARP) == 0), T.Then():
            for head in range(self.shared_heads):
                T.buffer_store(totals, self.totals[head], [head, T.floordiv(self.thread, WARP)])
        partial = shared((self.shared_heads, self.parts, self.wide))
        result = local((1,))
        for j in range(self.steps):
            if j:
                barrier()  # the elements before are written
            with T.If(part < self.parts), T.Then():
                for head in range(self.shared_heads):
                    T.buffer_store(partial, self.sums[head * self.steps + j], [head, part, own])
            barrier()
            with T.If(tirx.all(part == 0, own + j * self.wide < self.size)), T.Then():
                for head in range(self.shared_heads):
                    total = totals[head, 0]
                    for warp in range(1, WARPS):
                        total = total + totals[head, warp]
                    T.buffer_store(result, f32(0), [0])
                    for other in range(self.parts):
                        T.buffer_store(result, result[0] + partial[head, other, own], [0])
                    at = (self.group * self.shared_heads + head) * self.size + own + j * self.wide
                    T.buffer_store(out, result[0] / total, [self.row, at])

    @staticmethod
    def _held(value: Any) -> Any:
        """A number computed once, to be read several times."""
        one = local((1,))
        T.buffer_store(one, value, [0])
        return one[0]
