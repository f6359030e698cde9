"""Attention over pages on CUDA: K and V of the step's rows are written first, then rows attend, a text in parts.

A block takes one row and the query heads that share its loads of a kv head. Slots come in chunks that begin at
multiples of their size; of each, threads compute scores, a slot a thread, and then add up values, an element a thread,
which makes a record (targets/cuda/records.py). Records of a row are merged in the order of slots.

Where a sequence has a few rows, as in decoding, each chunk has a block, its records go to memory, and another launch
merges them: a long text keeps a chip busy. Rows of a sequence that has more, as in prefill, have a block each, which
merges as it goes. Chunks, records and merges are the same, so a row's bits are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import PAGE
from llmc.compiler.meaning.attending import bias_slopes
from llmc.targets.arguments import arguments
from llmc.targets.cuda.kv_kind import Pages, Token
from llmc.targets.cuda.kv_pages import KINDS
from llmc.targets.cuda.launch import (
    added,
    barrier,
    f32,
    fill,
    greater,
    held,
    i32,
    launch,
    local,
    shared,
    strided,
    warp_reduce,
)  # fmt: skip
from llmc.targets.cuda.records import LOWEST, Division, Record
from llmc.targets.cuda.rotation import rotate
from llmc.targets.cuda.scoring import Scoring
from llmc.targets.cuda.sight import CHUNK, Counting, Places, Sight, held_int
from llmc.targets.cuda.target import STATIC_SHARED_BYTES, WARP, CudaTarget

THREADS = CHUNK  # a slot a thread
WARPS = THREADS // WARP
FEW = 8  # rows of a sequence whose text is split; records of more would take much memory
MOST_HEADS = 8  # query heads of a block: each takes registers for its scores and sums


def attention(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), kv pages, seqs, slots, holes, page_indptr, page_ids -> (M, H D)."""
    return _attention(shapes, attrs)


def attention_with_sinks(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """As attention, sinks (H,) -> (M, H D)."""
    return _attention(shapes, attrs, "sinks")


def attention_by_distance(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """As attention, bias (H, 2W + 1) -> (M, H D)."""
    return _attention(shapes, {"bias": "none", **attrs}, "biases")


def _attention(shapes: list[Any], attrs: dict[str, Any], *more: str) -> tirx.PrimFunc:
    """`more` names what of Scoring the operands after page_ids are."""
    pages, (heads, groups, size) = KINDS[str(attrs["kv_dtype"])], _sizes(attrs)
    scale, bias = float(attrs["scale"]), str(attrs["bias"])
    slopes = () if bias == "none" else tuple(map(float, bias_slopes(bias, heads, scale)))
    with IRBuilder() as builder, T.prim_func():
        dtypes = ["float32", pages.dtype, *["int32"] * 5, *["float32"] * len(more), "float32"]
        qkv, kv, seqs, slots, holes, indptr, ids, *given, out = arguments(dtypes, shapes)
        scoring = Scoring(scale, float(attrs["soft_cap"]), slopes, **dict(zip(more, given, strict=True)))
        places = Places(
            seqs, indptr, ids, slots, holes=holes, window=int(attrs["window"]), causal=bool(attrs["causal"])
        )  # fmt: skip
        write_rows(pages, qkv, kv, places, (heads, groups, size))
        _Attention(pages, qkv, kv, out, places, scoring, (heads, groups, size)).emit()
    return builder.get()


def cross_attention(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """q (M, H D), kv, seqs (M,), source_lengths (S,), source_indptr (S + 1,), source_ids (Q,) -> (M, H D)."""
    pages = KINDS[str(attrs["kv_dtype"])]
    with IRBuilder() as builder, T.prim_func():
        dtypes = ["float32", pages.dtype, *["int32"] * 4, "float32"]
        q, kv, seqs, lengths, indptr, ids, out = arguments(dtypes, shapes)
        places = Places(seqs, indptr, ids, lengths=lengths)
        _Attention(pages, q, kv, out, places, Scoring(float(attrs["scale"])), _sizes(attrs)).emit()
    return builder.get()


def store_kv(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """rows (M, 2G D), kv pages, seqs, slots (M,), page_indptr (S + 1,), page_ids (P,) -> (1,), a zero."""
    pages, groups, size = KINDS[str(attrs["kv_dtype"])], int(attrs["kv_heads"]), int(attrs["head_dim"])
    with IRBuilder() as builder, T.prim_func():
        given, kv, seqs, slots, indptr, ids, out = arguments(["float32", pages.dtype, *["int32"] * 5], shapes)
        write_rows(pages, given, kv, Places(seqs, indptr, ids, slots), (0, groups, size))
        with launch({"threadIdx.x": WARP}) as (thread,), T.If(thread == 0), T.Then():
            T.buffer_store(out, i32(0), [0])
    return builder.get()


def _sizes(attrs: dict[str, Any]) -> tuple[int, int, int]:
    """Heads, kv heads, the size of one."""
    return int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])


def write_rows(pages: Pages, rows: Any, kv: Any, places: Places, sizes: tuple[int, int, int]) -> None:
    """A launch that writes K and V of all rows (M, (H + 2G) D)."""
    grid = {"blockIdx.x": rows.shape[0], "blockIdx.y": sizes[1], "threadIdx.x": THREADS}
    with launch(grid) as (row, group, thread):
        slot = places.slots[row]
        page = places.ids[places.indptr[places.seqs[row]] + T.floordiv(slot, PAGE)]
        write(pages, rows, kv, row, page, sizes, group, T.floormod(slot, PAGE), thread)


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

    def side(number: int) -> Callable[[Any], Any]:
        return lambda d: rows[row, (heads + number * groups + group) * size + d]

    pages.write(Token(kv, page, group, place, size), side(0), side(1), thread, THREADS)


def shared_heads(heads: int, size: int) -> int:
    """How many of the query heads of a kv head a block takes: the most that divide them and leave room for all."""
    for own in range(min(heads, MOST_HEADS), 0, -1):
        if heads % own == 0 and _shared_bytes(Division(own, size, THREADS)) <= STATIC_SHARED_BYTES:
            return own
    raise LlmcError(f"attention of heads of {size}: no CUDA kernel holds one")


def _shared_bytes(division: Division) -> int:
    """What the arrays of a block take: queries, weights, what warps found, sums of parts, counts."""
    own = division.size + CHUNK + 2 * WARPS + division.parts * division.wide
    return 4 * (division.heads * own + 8 * WARPS)


class _Attention:
    """The launches in which rows of q (M, ...) attend to pages that are written."""

    def __init__(
        self,
        pages: Pages,
        q: Any,
        kv: Any,
        out: Any,
        places: Places,
        scoring: Scoring,
        sizes: tuple[int, int, int],
    ) -> None:
        self.pages, self.q, self.kv, self.out, self.places, self.scoring = pages, q, kv, out, places, scoring
        heads, groups, size = sizes
        self.shared, self.rows = heads // groups, q.shape[0]
        own = shared_heads(self.shared, size)
        self.division, self.shares = Division(own, size, THREADS), heads // own

    def emit(self) -> None:
        """All of them."""
        records = T.alloc_buffer((self.places.parts, FEW, self.shares, self.division.numbers), "float32")
        with T.If(self.rows > FEW), T.Then(), self._launch(self.rows) as (row, share, thread):
            self._whole(row, share, thread)
        with self._launch(self.places.parts) as (part, share, thread):
            self._part(part, share, thread, records)
        with self._launch(self.rows) as (row, share, thread):
            self._merge(row, share, thread, records)
        if self.pages.rotated:
            with self._launch(self.rows) as (row, share, thread):
                self._turn_back(row, share, thread)

    def _launch(self, blocks: Any) -> Any:
        return launch({"blockIdx.x": blocks, "blockIdx.y": self.shares, "threadIdx.x": THREADS})

    def _whole(self, row: Any, share: Any, thread: Any) -> None:
        """A row of a sequence that has many, over all of its text."""
        counting = Counting(thread, THREADS)
        with T.If(counting.rows(self.places, self.places.seqs[row]) > FEW), T.Then():
            reads = _Row(self, share, thread)
            reads.look(row, Sight(self.places, row, counting))
            total, part = Record(self.division), Record(self.division)
            self._clear(total, share)
            first, end = reads.sight.chunks
            with T.serial(first, end) as chunk, T.If(tirx.Not(reads.sight.hides(chunk))), T.Then():
                reads.attend(chunk, part)
                total.merge(part)
            self._finish(total, row, share, thread)

    def _part(self, part: Any, share: Any, thread: Any, records: Any) -> None:
        """One chunk of a sequence, for each of its rows if they are few."""
        places, counting = self.places, Counting(thread, THREADS)
        before = counting.where(places.indptr.shape[0] - 1, lambda s: places.first_part(s) <= part)
        seq = held_int(before - 1)
        chunk, count = held_int(part - places.first_part(seq)), counting.rows(places, seq)
        with T.If(count <= FEW), T.Then():
            reads, record, row = _Row(self, share, thread), Record(self.division), local((1,), "int32")
            T.buffer_store(row, i32(-1), [0])
            with T.serial(0, count) as number:
                barrier()  # the row before is done with
                T.buffer_store(row, counting.next_row(places, seq, row[0]), [0])
                sight = Sight(places, row[0], counting)
                first, end = sight.chunks
                with T.If(tirx.all(chunk >= first, chunk < end)), T.Then():
                    reads.look(row[0], sight)
                    reads.attend(chunk, record)
                    record.save(records, (part, number, share), thread)

    def _merge(self, row: Any, share: Any, thread: Any, records: Any) -> None:
        """What the chunks of a row come to, if its sequence has few."""
        places, counting = self.places, Counting(thread, THREADS)
        seq = held_int(places.seqs[row])
        with T.If(counting.rows(places, seq) <= FEW), T.Then():
            number = counting.where(row, lambda i: places.seqs[i] == seq)
            sight = Sight(places, row, counting)
            total, part = Record(self.division), Record(self.division)
            self._clear(total, share)
            first, end = sight.chunks
            with T.serial(first, end) as chunk:
                part.load(records, (places.first_part(seq) + chunk, number, share), thread)
                total.merge(part)
            self._finish(total, row, share, thread)

    def _clear(self, total: Record, share: Any) -> None:
        heads, sinks = self.division.heads, self.scoring.sinks
        total.clear(None if sinks is None else [sinks[share * heads + head] for head in range(heads)])

    def _turn_back(self, row: Any, share: Any, thread: Any) -> None:
        """What was made of rotated values, in place."""
        count = self.division.heads * self.division.size
        mixed = shared((count,))
        strided(count, thread, THREADS, lambda i: T.buffer_store(mixed, self.out[row, share * count + i], [i]))
        rotate(mixed, count, self.division.size, thread, THREADS)
        strided(count, thread, THREADS, lambda i: T.buffer_store(self.out, mixed[i], [row, share * count + i]))

    def _finish(self, total: Record, row: Any, share: Any, thread: Any) -> None:
        total.finish(self.out, row, share * (self.division.heads * self.division.size), thread)


class _Row:
    """One row's attention to the slots of one kv head, for the query heads of a share."""

    def __init__(self, of: _Attention, share: Any, thread: Any) -> None:
        self.pages, self.q, self.kv, self.division, self.thread = of.pages, of.q, of.kv, of.division, thread
        self.scoring = of.scoring
        self.heads, self.size = self.division.heads, self.division.size
        self.first_head = share * self.heads
        self.group = T.floordiv(self.first_head, of.shared)
        self.slopes = self.scoring.own_slopes(share, self.heads)
        self.queries = shared((self.heads * self.size,))
        self.weights, self.reduced = shared((self.heads, CHUNK)), shared((self.heads, 2, WARPS))
        self.scores = local((self.heads,))

    def look(self, row: Any, sight: Sight) -> None:
        """From this row."""
        self.sight = sight
        strided(
            self.heads * self.size, self.thread, THREADS,
            lambda i: T.buffer_store(
                self.queries, self.pages.query(self.q[row, self.first_head * self.size + i]), [i]
            ),
        )  # fmt: skip

        if self.pages.rotated:
            rotate(self.queries, self.heads * self.size, self.size, self.thread, THREADS)

    def _token(self, slot: Any) -> Token:
        return Token(self.kv, held_int(self.sight.page(slot)), self.group, T.floormod(slot, PAGE), self.size)

    def attend(self, chunk: Any, to: Record) -> None:
        """A chunk's record."""
        barrier()  # queries are there; the chunk before is done with
        self._score(chunk * CHUNK + self.thread)
        barrier()
        self._weigh(to)
        barrier()
        self._add_values(chunk * CHUNK, to)

    def _reduce(self, values: Any, head: int, which: int, combine: Any) -> None:
        """What each warp's values come to, into `reduced`."""
        warp_reduce(values, head, combine)
        with T.If(T.floormod(self.thread, WARP) == 0), T.Then():
            T.buffer_store(self.reduced, values[head], [head, which, T.floordiv(self.thread, WARP)])

    def _score(self, slot: Any) -> None:
        """Scores of the thread's slot; the greatest of each warp to `reduced`."""
        fill(self.scores, f32(0))
        self.seen = local((1,), "int32")
        T.buffer_store(self.seen, T.Select(self.sight.sees(slot), i32(1), i32(0)), [0])
        with T.If(self.seen[0] != 0), T.Then():
            read, unit = self.pages.keys(self._token(slot)), self.pages.unit
            with T.serial(0, -(-self.size // unit)) as step:
                for e, number in enumerate(read(step)):
                    key, d = held(number), step * unit + e
                    for head in range(self.heads):
                        query = self.queries[head * self.size + d]
                        query = T.if_then_else(d < self.size, query, f32(0)) if self.size % unit else query
                        T.buffer_store(self.scores, self.scores[head] + query * key, [head])
        most = local((self.heads,))
        for head in range(self.heads):
            slope = None if self.slopes is None else self.slopes[head]
            score = self.scoring.score(self.scores[head], self.first_head + head, slope, self.sight.place(slot))
            T.buffer_store(self.scores, T.Select(self.seen[0] != 0, score, f32(LOWEST)), [head])
            T.buffer_store(most, self.scores[head], [head])
            self._reduce(most, head, 0, greater)

    def _weigh(self, to: Record) -> None:
        """Weights of the chunk's slots by the greatest score; their sums by warps to `reduced`."""
        for head in range(self.heads):
            T.buffer_store(to.tops, self.reduced[head, 0, 0], [head])
            for warp in range(1, WARPS):
                T.buffer_store(to.tops, T.max(to.tops[head], self.reduced[head, 0, warp]), [head])
            weight = held(T.Select(self.seen[0] != 0, T.exp(self.scores[head] - to.tops[head]), f32(0)))
            T.buffer_store(self.weights, weight, [head, self.thread])
            T.buffer_store(to.totals, weight, [head])
            self._reduce(to.totals, head, 1, added)

    def _add_values(self, begin: Any, to: Record) -> None:
        """Values of the chunk's slots, those of a part to each thread, times their weights; and sums of these."""
        division = self.division
        for head in range(self.heads):
            T.buffer_store(to.totals, self.reduced[head, 1, 0], [head])
            for warp in range(1, WARPS):
                T.buffer_store(to.totals, to.totals[head] + self.reduced[head, 1, warp], [head])
        fill(to.sums, f32(0))
        part, own = T.floordiv(self.thread, division.wide), T.floormod(self.thread, division.wide)
        with T.serial(0, -(-CHUNK // division.parts)) as step:
            place = step * division.parts + part
            inside = tirx.all(part < division.parts, place < CHUNK, self.sight.sees(begin + place))
            with T.If(inside), T.Then():
                read = self.pages.values(self._token(begin + place))
                for j in range(division.steps):
                    with T.If(own + j * division.wide < self.size), T.Then():
                        value = held(read(own + j * division.wide))
                        for head in range(self.heads):
                            i = head * division.steps + j
                            T.buffer_store(to.sums, to.sums[i] + self.weights[head, place] * value, [i])
