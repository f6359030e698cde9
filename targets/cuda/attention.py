"""Attention over pages on CUDA: K and V of the step's rows are written first, then rows attend, a text in parts.

A block takes query heads that share a kv head, of some rows. Slots come in chunks that begin at multiples of their
size; of each it makes a record (targets/cuda/attending.py, records.py). Records of a row are merged in the order of
slots.

Where a sequence has a few rows, as in decoding, each chunk has a block, its records go to memory, and another launch
merges them: a long text keeps a chip busy. Of a sequence that has more, as in prefill, a block takes some rows over all
of their text, and merges as it goes. Chunks, records and merges are the same, so a row's bits are.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.meaning.attending import bias_slopes
from llmc.targets.arguments import arguments
from llmc.targets.cuda.attending import Attending
from llmc.targets.cuda.attention_block import MOST_TILES, THREADS, TILE, Block
from llmc.targets.cuda.finding import FEW, Finding
from llmc.targets.cuda.fragments import COLUMNS
from llmc.targets.cuda.kv_kind import Pages
from llmc.targets.cuda.kv_pages import KINDS
from llmc.targets.cuda.kv_writing import is_staged, write_rows, write_turned
from llmc.targets.cuda.launch import barrier, bf16_pair, dynamic, f32, i32, launch, local, shared, strided, together
from llmc.targets.cuda.prelude import after_launches
from llmc.targets.cuda.records import LOWEST, Record
from llmc.targets.cuda.rotation import rotate
from llmc.targets.cuda.scoring import Scoring
from llmc.targets.cuda.sight import CHUNK, Counting, Places, Sequence, Sight, held_int
from llmc.targets.cuda.staged_chunk import StagedChunk
from llmc.targets.cuda.staged_part import StagedPart, part_bytes, part_memory, parts_together
from llmc.targets.cuda.staged_queries import StagedQueries
from llmc.targets.cuda.staged_whole import StagedWhole, rows_of_block
from llmc.targets.cuda.target import WARP, CudaTarget

MERGED_AT_ONCE = 4  # chunks whose records are read before they are merged
STATISTICS = 4  # of a record, beside sums: the total, the greatest score, and room


def attention(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], rounded: bool = False) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), kv pages, seqs, slots, holes, page_indptr, page_ids -> (M, H D); `rounded`: as pairs of
    bfloat16 (M, H D / 2)."""
    return _attention(target, shapes, attrs, rounded=rounded)


def rope_attention(
    target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], rounded: bool = False
) -> tirx.PrimFunc:  # fmt: skip
    """As attention, table (M, R) after qkv: what is written, and what attends, is turned first."""
    return _attention(target, shapes, attrs, turned=True, rounded=rounded)


def attention_with_sinks(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """As attention, sinks (H,) -> (M, H D)."""
    return _attention(target, shapes, attrs, "sinks")


def attention_by_distance(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """As attention, bias (H, 2W + 1) -> (M, H D)."""
    return _attention(target, shapes, {"bias": "none", **attrs}, "biases")


def _attention(
    target: CudaTarget, shapes: list[Any], attrs: dict[str, Any], *more: str, turned: bool = False,
    rounded: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """`more` names what of Scoring the operands after page_ids are. `turned`: a table follows qkv."""
    pages, (heads, groups, size) = KINDS[str(attrs["kv_dtype"])], _sizes(attrs)
    scale, bias = float(attrs["scale"]), str(attrs["bias"])
    slopes = () if bias == "none" else tuple(map(float, bias_slopes(bias, heads, scale)))
    with IRBuilder() as builder, T.prim_func():
        given = [*["float32"] * (1 + turned), pages.dtype, *["int32"] * 5, *["float32"] * len(more)]
        dtypes = [*given, "int32" if rounded else "float32"]
        qkv, *rest = arguments(dtypes, shapes)
        table = rest.pop(0) if turned else None
        kv, seqs, slots, holes, indptr, ids, *others, out = rest
        scoring = Scoring(scale, float(attrs["soft_cap"]), slopes, **dict(zip(more, others, strict=True)))
        places = Places(
            seqs, indptr, ids, slots, holes=holes, window=int(attrs["window"]), causal=bool(attrs["causal"])
        )  # fmt: skip
        sizes = (heads, groups, size)
        if table is None:
            write_rows(pages, qkv, kv, places, sizes)
        else:
            qkv = write_turned(pages, qkv, table, kv, places, sizes, str(attrs["layout"]))
        _Attention(target, pages, qkv, kv, out, places, scoring, sizes).emit()
    return builder.get()


def cross_attention(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """q (M, H D), kv, seqs (M,), source_lengths (S,), source_indptr (S + 1,), source_ids (Q,) -> (M, H D)."""
    pages = KINDS[str(attrs["kv_dtype"])]
    with IRBuilder() as builder, T.prim_func():
        dtypes = ["float32", pages.dtype, *["int32"] * 4, "float32"]
        q, kv, seqs, lengths, indptr, ids, out = arguments(dtypes, shapes)
        places = Places(seqs, indptr, ids, lengths=lengths)
        _Attention(target, pages, q, kv, out, places, Scoring(float(attrs["scale"])), _sizes(attrs)).emit()
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


def shared_heads(heads: int) -> int:
    """How many of the query heads of a kv head a block takes: the most that divide them."""
    return next(own for own in range(min(heads, TILE), 0, -1) if heads % own == 0)


class _Attention:
    """The launches in which rows of q (M, ...) attend to pages that are written."""

    def __init__(
        self,
        target: CudaTarget,
        pages: Pages,
        q: Any,
        kv: Any,
        out: Any,
        places: Places,
        scoring: Scoring,
        sizes: tuple[int, int, int],
    ) -> None:
        self.target, self.pages, self.scoring = target, pages, scoring
        self.q, self.kv, self.out, self.places = q, kv, out, places
        heads, groups, self.size = sizes
        self.shared, self.rows = heads // groups, q.shape[0]
        self.own = shared_heads(self.shared)
        self.shares = heads // self.own
        self.staged = is_staged(pages, self.size) and part_bytes(self.size) <= target.shared_bytes
        self.paired = self.staged and not pages.rotated  # what can give pairs of bfloat16 at once
        self.width = -(-self.size // COLUMNS) * COLUMNS  # of sums in a record: these stand in multiples of 16 bytes
        self.few, self.many = (Block.best(self.own, self.size, pages.parts, tiles) for tiles in (1, MOST_TILES))

    def emit(self) -> None:
        """All of them, and where results are to be pairs that these do not give, one more."""
        rounded, given = str(self.out.dtype) == "int32", self.out
        if rounded and not self.paired:
            self.out = T.alloc_buffer((self.rows, self.shares * self.own * self.size), "float32")
        self._attend()
        if self.out is not given:
            self._round(given)

    def _attend(self) -> None:
        if self.pages.rotated:
            self.q = self._turned()
        records = T.alloc_buffer((self.places.parts, FEW, self.shares * self.own, self.width + STATISTICS), "float32")
        with T.If(self.rows > FEW), T.Then():
            if self.staged:
                self._whole_staged()
            else:
                blocks = T.floordiv(self.rows + (self.many.rows - 1), self.many.rows)
                with self._launch(blocks) as (block, share, thread):
                    self._whole(block, share, thread)
        if self.staged:
            self._parts_staged(records)
        else:
            with self._launch(self.places.parts) as (part, share, thread):
                self._part(part, share, thread, records)
        most = (self.places.indptr.shape[0] - 1) * FEW  # rows of sequences that have few
        each = {"blockIdx.x": T.min(self.rows, most), "blockIdx.y": self.shares * self.own, "threadIdx.x": THREADS}
        with launch(each, waits=False) as (number, head, thread):
            self._merge(number, most, head, thread, records)
        if self.pages.rotated:
            with self._launch(self.rows) as (row, share, thread):
                self._turn(self.out, self.out, row, share, thread)

    def _round(self, pairs: Any) -> None:
        """A launch that gives the results as pairs of bfloat16."""
        count = int(pairs.shape[1])
        grid = {"blockIdx.x": self.rows, "blockIdx.y": -(-count // THREADS), "threadIdx.x": THREADS}
        with launch(grid) as (row, block, thread):
            at = block * THREADS + thread
            with T.If(at < count), T.Then():
                T.buffer_store(pairs, bf16_pair(self.out[row, 2 * at], self.out[row, 2 * at + 1]), [row, at])

    def _whole_staged(self) -> None:
        """A launch for rows of sequences that have many: blocks of later rows, which have more to do, come first."""
        count = rows_of_block(self.own)
        blocks = T.floordiv(self.rows + (count - 1), count)
        grid = {"blockIdx.x": self.shares, "blockIdx.y": blocks, "threadIdx.x": THREADS}
        with launch(grid, waits=False) as (share, turn, thread):
            words, kept = StagedChunk.words(self.size), TILE * self.size // 2  # of a warp's queries
            memory = dynamic(words + THREADS // WARP * kept, 8 * count)
            queries, chunk = self._staged(share, thread, memory, words + T.floordiv(thread, WARP) * kept)
            StagedWhole(queries, chunk, self.places, thread).emit(
                blocks - 1 - turn, self.out, lambda row, head, d: [row, (share * self.own + head) * self.size + d]
            )

    def _parts_staged(self, records: Any) -> None:
        """A launch for the chunks of sequences that have few."""
        grid = {"blockIdx.x": self.places.parts, "blockIdx.y": self.shares, "threadIdx.x": THREADS}
        with launch(grid, waits=False) as (part, share, thread), together(parts_together(self.target, self.size)):
            queries, chunk = self._staged(share, thread, part_memory(self.size))
            StagedPart(queries, chunk, self.places, thread).emit(
                part, records, lambda row, head, d: [part, row, share * self.own + head, d]
            )

    def _staged(self, share: Any, thread: Any, memory: Any, kept: Any = None) -> tuple[StagedQueries, StagedChunk]:
        """Queries of a warp, in registers or in memory from word `kept` on, and the chunk of a block."""
        lane, group = T.floormod(thread, WARP), T.floordiv(share * self.own, self.shared)
        place = None if kept is None else (memory, kept)
        queries = StagedQueries(self.q, self.own, self.size, self.scoring, share * self.own, lane, place)
        return queries, StagedChunk(self.kv, group, self.size, memory, lane)

    def _launch(self, blocks: Any) -> Any:
        return launch({"blockIdx.x": blocks, "blockIdx.y": self.shares, "threadIdx.x": THREADS})

    def _attending(self, block: Block, share: Any, thread: Any) -> Attending:
        group = T.floordiv(share * self.own, self.shared)
        return Attending(block, self.pages, self.q, self.kv, self.scoring, share, group, thread)

    def _whole(self, block: Any, share: Any, thread: Any) -> None:
        """Some rows, those of sequences that have many, over all of their text: one sequence after another."""
        places, counting, count = self.places, Counting(thread, THREADS), self.many.rows
        begin, rows = held_int(block * count), held_int(self.rows)
        attending = self._attending(self.many, share, thread)
        total, part = attending.record(), attending.record()
        leads = shared((count,), "int32")  # whether a row is the first one of its sequence here, and how many that has

        def lead(i: Any) -> None:
            T.buffer_store(leads, T.Select(begin + i < rows, i32(1), i32(0)), [i])
            with T.serial(0, i) as before:
                same = tirx.all(begin + i < rows, places.seqs[begin + before] == places.seqs[begin + i])
                with T.If(same), T.Then():
                    T.buffer_store(leads, i32(0), [i])

        strided(count, thread, THREADS, lead)
        barrier()
        counting.rows_of_each(places, leads, count, begin)
        with T.serial(0, count, unroll=False) as first, T.If(leads[first] > FEW), T.Then():
            seq = held_int(places.seqs[begin + first])

            def row(i: Any) -> Any:
                there = tirx.all(i < count, begin + i < rows)
                own = places.seqs[T.Select(there, begin + i, begin)]
                return T.Select(tirx.all(there, own == seq), begin + i, i32(-1))

            attending.look(Sequence(places, seq, counting), row)
            attending.clear(total)
            start, end = attending.chunks
            with T.serial(start, end, unroll=False) as chunk, attending.sequence.shown(chunk):
                attending.attend(chunk, part)
                total.merge(part)
            total.finish()
            attending.each_sum(
                lambda at, query, row, d: T.buffer_store(
                    self.out, total.average(at), [row, (share * self.own + query % self.own) * self.size + d]
                )
            )

    def _part(self, part: Any, share: Any, thread: Any, records: Any) -> None:
        """One chunk of a sequence, for each of its rows if they are few."""
        places, counting, block = self.places, Counting(thread, THREADS), self.few
        before = counting.where(places.indptr.shape[0] - 1, lambda s: places.first_part(s) <= part)
        seq = held_int(before - 1)
        chunk, count = held_int(part - places.first_part(seq)), counting.rows(places, seq)
        with T.If(count <= FEW), T.Then():
            own = shared((FEW,), "int32")
            last = local((1,), "int32")
            T.buffer_store(last, i32(-1), [0])
            with T.serial(0, count) as number:
                T.buffer_store(last, counting.next_row(places, seq, last[0]), [0])
                with T.If(thread == 0), T.Then():
                    T.buffer_store(own, last[0], [number])
                barrier()
            attending = self._attending(block, share, thread)
            record = attending.record()
            sequence = Sequence(places, seq, counting)
            with T.serial(0, T.floordiv(count + (block.rows - 1), block.rows), unroll=False) as turn:
                number = held_int(turn * block.rows)

                def row(i: Any) -> Any:
                    there = tirx.all(i < block.rows, number + i < count)
                    return T.if_then_else(there, own[T.min(number + i, FEW - 1)], i32(-1))

                attending.look(sequence, row)
                start, end = attending.chunks
                with T.If(tirx.all(chunk >= start, chunk < end)), T.Then(), sequence.shown(chunk):
                    attending.attend(chunk, record)
                    self._save(attending, record, records, part, number, share)

    def _save(self, attending: Attending, record: Record, records: Any, part: Any, number: Any, share: Any) -> None:
        """What a chunk gave, from row `number` of the sequence's on: sums, then the total and the greatest score."""
        own = self.own

        def place(query: Any, d: Any) -> list[Any]:
            return [part, number + T.floordiv(query, own), share * own + T.floormod(query, own), d]

        attending.each_sum(lambda at, query, row, d: T.buffer_store(records, record.sums[at], place(query, d)))
        with T.If(tirx.all(attending.quarter == 0, attending.warp == 0)), T.Then():
            for which, query in enumerate(attending.own):
                with T.If(attending.own_rows[which] >= 0), T.Then():
                    T.buffer_store(records, record.totals[which], place(query, self.width))
                    T.buffer_store(records, record.tops[which], place(query, self.width + 1))

    def _merge(self, number: Any, most: Any, head: Any, thread: Any, records: Any) -> None:
        """What the chunks of a row come to for a head, if its sequence has few: a thread an element.

        Of more than `most` rows, those that the sequences might have are numbered, FEW of each; of others, all rows.
        """
        places, size = self.places, self.size
        finding = Finding(places, thread, THREADS // WARP)
        number, by_row = held_int(number), self.rows <= most
        seq = held_int(T.if_then_else(by_row, places.seqs[T.Select(by_row, number, 0)], T.floordiv(number, FEW)))
        count = held_int(finding.few_rows(seq))
        before_it = local((1,), "int32")  # of the row, among those of its sequence
        T.buffer_store(before_it, T.Select(by_row, 0, T.floormod(number, FEW)), [0])
        with T.If(by_row), T.Then():
            for own in range(FEW):
                before = tirx.all(own < count, finding.row(own) < number)
                T.buffer_store(before_it, before_it[0] + T.Select(before, 1, 0), [0])
        place = before_it[0]
        sequence = Sequence(places, seq, Counting(thread, THREADS))
        there = tirx.all(count <= FEW, place < count)
        row = held_int(T.if_then_else(there, finding.row(T.min(place, FEW - 1)), -1))
        start, end = (held_int(chunk) for chunk in Sight(sequence, row).chunks)
        first = held_int(places.first_part(seq))
        after_launches()
        each = 1 + (str(self.out.dtype) == "int32")
        with T.If(row >= 0), T.Then():
            strided(
                size // each, thread, THREADS,
                lambda d: self._merge_some(records, row, head, d * each, each, [first, place, start, end], sequence),
            )  # fmt: skip

    def _merge_some(
        self, records: Any, row: Any, head: Any, d: Any, each: int, where: list[Any], sequence: Sequence
    ) -> None:
        """Elements of a row's head, `each` from d on, from chunks `start` to `end`: some chunks are read at once, those
        beyond as none."""
        (first, place, start, end), total, part = where, Record([0] * each), Record([0] * each)
        total.clear(None if self.scoring.sinks is None else [self.scoring.sink(head)])
        *sums, totals, tops = (local((MERGED_AT_ONCE,)) for _ in range(each + 2))
        read = [*((of, d + e, 0) for e, of in enumerate(sums)), (totals, self.width, 0), (tops, self.width + 1, LOWEST)]
        with T.serial(0, T.floordiv(end - start + (MERGED_AT_ONCE - 1), MERGED_AT_ONCE), unroll=False) as turn:
            for i in range(MERGED_AT_ONCE):
                chunk = held_int(start + turn * MERGED_AT_ONCE + i)
                there = held_int(T.Select(tirx.all(chunk < end, tirx.Not(sequence.hides(chunk * CHUNK, CHUNK))), 1, 0))
                for to, at, nothing in read:
                    found = T.if_then_else(there != 0, records[first + chunk, place, head, at], f32(nothing))
                    T.buffer_store(to, found, [i])
            for i in range(MERGED_AT_ONCE):
                for e, of in enumerate(sums):
                    T.buffer_store(part.sums, of[i], [e])
                T.buffer_store(part.totals, totals[i], [0])
                T.buffer_store(part.tops, tops[i], [0])
                total.merge(part)
        total.finish()
        if each == 1:
            T.buffer_store(self.out, total.average(0), [row, head * self.size + d])
        else:
            pair = bf16_pair(total.average(0), total.average(1))
            T.buffer_store(self.out, pair, [row, T.floordiv(head * self.size + d, 2)])

    def _turned(self) -> Any:
        """Queries rotated as K is, by a launch."""
        turned = T.alloc_buffer((self.rows, self.shares * self.own * self.size), "float32")
        with self._launch(self.rows) as (row, share, thread):
            self._turn(self.q, turned, row, share, thread)
        return turned

    def _turn(self, x: Any, to: Any, row: Any, share: Any, thread: Any) -> None:
        """A block's heads of a row, rotated: there or back."""
        count = self.own * self.size
        mixed = shared((count,))
        strided(count, thread, THREADS, lambda i: T.buffer_store(mixed, x[row, share * count + i], [i]))
        rotate(mixed, count, self.size, thread, THREADS)
        strided(count, thread, THREADS, lambda i: T.buffer_store(to, mixed[i], [row, share * count + i]))
