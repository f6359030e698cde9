"""Which rows attend together, and which threads work for them: found at run time, for prefill, chunks and decode alike.

Rows of one sequence form blocks, whose query heads of a kv head share every K and V load; a task takes a block through
all chunks of its text. Where a sequence has a row or two, a task is one chunk of one row, so that a long text keeps all
threads busy, and records of chunks are merged afterwards. Both merge the same records in the same order.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.attention.kv_pages import Pages
from llmc.targets.attention.kv_stream import streams
from llmc.targets.attention.online_softmax import Attending, Records
from llmc.targets.attention.scoring import Scoring
from llmc.targets.attention.sight import CHUNK, Places, Sight
from llmc.targets.attention.tile_products import TileAttending
from llmc.targets.attention.vector_products import VectorAttending
from llmc.targets.parallel import parallel
from llmc.targets.rows.rows import PARALLEL_ROWS
from llmc.targets.target import Target
from llmc.targets.vector import i32, imported, registers

FEW_TASKS = 32  # fewer are split by chunks even where a row fills a block


def attend(
    target: Target, kv: Pages, q: Any, out: Any, places: Places, heads: int, groups: int, scoring: Scoring
) -> None:
    """Every row of q (M, ...) to what it sees -> out (M, H D)."""
    with imported(*kv.functions):
        _Rows(target, kv, q, out, places, heads, groups, scoring).emit()


def parts_of(heads: int) -> int:
    """In how many parts the query heads that share a kv head go to different threads: of at most a block, or one."""
    return next((p for p in range(1, heads // 8 + 1) if heads % p == 0 and heads // p <= VectorAttending.usual), 1)


class _Rows:
    def __init__(
        self, target: Target, kv: Pages, q: Any, out: Any, places: Places, heads: int, groups: int, scoring: Scoring
    ) -> None:
        self.target, self.kv, self.q, self.out, self.places, self.scoring = target, kv, q, out, places, scoring
        self.shared, self.parts = heads // groups, parts_of(heads // groups)
        self.shares, self.rows = groups * self.parts, q.shape[0]
        own = self.shared // self.parts
        self.attending: type[Attending] = TileAttending if kv.tiles else VectorAttending
        self.wide, self.single = (
            self.attending.block_of(target, rows, own) for rows in (max(1, self.attending.usual // own), 1)
        )
        self.counts = registers((3,), "int32")  # blocks, single rows, chunks of these
        self.table = T.alloc_buffer((self.rows * 4,), "int32")  # block: first row, rows; single: row, first chunk's job

    def emit(self) -> None:
        """The kernel's body."""
        self._find()
        blocks, singles, jobs = (self.counts[i] for i in range(3))
        with T.If(blocks > 0), T.Then(), parallel(self.target, blocks * self.shares) as task:
            self._block(task, blocks)
        with T.If(singles > 0), T.Then():
            self._singles(singles, T.cast(jobs, "int64") * self.shares)

    def _entry(self, kind: int, i: Any, field: int) -> Any:
        """The place in the table of what is known of the i-th block (kind 0) or single row (kind 1)."""
        return kind * 2 * self.rows + i * 2 + field

    def _find(self) -> None:
        """Blocks and single rows of this step. A sequence's rows are neighbours."""
        counts, row, run = self.counts, registers((1,), "int32"), registers((1,), "int32")
        rows, seqs = T.cast(self.rows, "int32"), self.places.seqs
        for i in range(3):
            T.buffer_store(counts, i32(0), [i])
        T.buffer_store(row, i32(0), [0])
        with T.While(row[0] < rows):
            T.buffer_store(run, i32(1), [0])
            following = T.min(row[0] + run[0], rows - 1)
            with T.While(T.And(row[0] + run[0] < rows, seqs[following] == seqs[row[0]])):
                T.buffer_store(run, run[0] + 1, [0])
            with T.If(self._is_few(run[0], rows)):
                with T.Then(), T.serial(0, run[0]) as more:
                    self._add_single(row[0] + more)
                with T.Else(), T.serial(0, T.floordiv(run[0] + (self.wide.rows - 1), self.wide.rows)) as block:
                    first = block * self.wide.rows
                    T.buffer_store(self.table, row[0] + first, [self._entry(0, counts[0], 0)])
                    own = T.min(run[0] - first, self.wide.rows)
                    T.buffer_store(self.table, own, [self._entry(0, counts[0], 1)])
                    T.buffer_store(counts, counts[0] + 1, [0])
            T.buffer_store(row, row[0] + run[0], [0])

    def _is_few(self, run: Any, rows: Any) -> Any:
        """Whether so many rows of a sequence are better off one by one."""
        if self.wide.rows > 1:
            few = run * 3 <= self.wide.rows + 2
            if not self.kv.tiles:
                return few
            # A block is hardly more work for tiles than a row, and reads the text once: but threads must have tasks.
            return T.Or(run == 1, T.And(few, rows * self.shares < FEW_TASKS * run))
        return T.And(run == 1, rows * self.shares < FEW_TASKS)  # records of many rows would take much memory

    def _add_single(self, row: Any) -> None:
        counts = self.counts
        T.buffer_store(self.table, row, [self._entry(1, counts[1], 0)])
        T.buffer_store(self.table, counts[2], [self._entry(1, counts[1], 1)])
        T.buffer_store(counts, counts[1] + 1, [1])
        T.buffer_store(counts, counts[2] + Sight(self.places, row, 1, 1).chunks[1], [2])

    def _share(self, share: Any) -> tuple[Any, Any]:
        """The kv head and the first query head of a share of a row's work."""
        group = T.floordiv(share, self.parts)
        return group, group * self.shared + T.floormod(share, self.parts) * self.single.heads

    def _sink(self, head: Any) -> Any:
        return None if self.scoring.sinks is None else self.scoring.sinks[head]

    def _block(self, task: Any, blocks: Any) -> None:
        """One share of a block, through all chunks."""
        turn, share = T.floordiv(task, self.shares), T.floormod(task, self.shares)
        # Late rows of a prefill see more tokens: pair the first with the last so that threads get equal work.
        half = T.floordiv(turn, 2)
        number, at = T.if_then_else(T.floormod(turn, 2) == 0, half, blocks - 1 - half), registers((2,), "int32")
        for field in range(2):
            T.buffer_store(at, self.table[self._entry(0, number, field)], [field])
        row, count = at[0], at[1]
        (group, first_head), kv, block = self._share(share), self.kv, self.wide
        sight = Sight(self.places, row, count, block.rows)
        attending = self.attending(self.target, kv, block, sight, self.scoring, count, group, first_head)
        attending.load(self.q, row)
        total, part = (
            Records(registers((block.room * Records.size(kv.width),), "float32"), 0, kv.width) for _ in range(2)
        )
        with T.serial(0, count * block.heads) as vector:
            total.clear(vector, self._sink(first_head + T.floormod(vector, block.heads)))
        first, chunks = sight.chunks
        with T.serial(0, chunks) as number:
            attending.chunk(first + number, part)
            with T.serial(0, count) as r, T.If(sight.sees(r, first + number)), T.Then(), T.serial(0, block.heads) as h:
                total.merge(part, r * block.heads + h, r * block.heads + h)
        with T.serial(0, count) as r, T.serial(0, block.heads) as h:
            total.finish(kv, r * block.heads + h, self.out, row + r, (first_head + h) * kv.size)

    def _singles(self, singles: Any, jobs: Any) -> None:
        """Records of each chunk of single rows, and then what they come to."""
        size = self.single.room * Records.size(self.kv.width)
        records = T.alloc_buffer((jobs * size,), "float32")
        owner = T.alloc_buffer((jobs,), "int32")  # the single row of a chunk
        with T.serial(0, singles) as i, T.serial(0, self._chunks(i, singles)) as chunk:
            T.buffer_store(owner, i, [self.table[self._entry(1, i, 1)] + chunk])
        with parallel(self.target, T.cast(jobs, "int32")) as task:
            self._job(task, owner, Records(records, T.cast(task, "int64") * size, self.kv.width))
        with T.If(singles < PARALLEL_ROWS):
            with T.Then(), T.serial(0, singles * self.shares) as task:
                self._merge(task, records, singles)
            with T.Else(), parallel(self.target, singles * self.shares) as task:
                self._merge(task, records, singles)

    def _chunks(self, i: Any, singles: Any) -> Any:
        """How many chunks the i-th single row sees."""
        following = self.table[self._entry(1, T.min(i + 1, singles - 1), 1)]
        return T.if_then_else(i + 1 < singles, following, self.counts[2]) - self.table[self._entry(1, i, 1)]

    def _job(self, task: Any, owner: Any, to: Records) -> None:
        """One chunk of a share of a single row. Shares of a chunk follow each other: memory has them side by side."""
        found = registers((2,), "int32")
        T.buffer_store(found, owner[T.floordiv(task, self.shares)], [0])
        T.buffer_store(found, self.table[self._entry(1, found[0], 0)], [1])
        row = found[1]
        inside = task - self.table[self._entry(1, found[0], 1)] * self.shares
        share = T.floormod(inside, self.shares)
        group, first_head = self._share(share)
        sight = Sight(self.places, row, 1, 1)
        attending = self.attending(self.target, self.kv, self.single, sight, self.scoring, 1, group, first_head)
        attending.load(self.q, row)
        if streams(self.kv):
            attending.ask_in_order(share, self.shares, T.floordiv(inside, self.shares), sight.chunks[1])
        last = share + 1 == self.shares
        following = self._share(T.if_then_else(last, i32(0), share + 1))[0], T.if_then_else(last, i32(CHUNK), i32(0))
        attending.chunk(sight.chunks[0] + T.floordiv(inside, self.shares), to, following)

    def _merge(self, task: Any, records: Any, singles: Any) -> None:
        """All chunks of a share of a single row."""
        i, share = T.floordiv(task, self.shares), T.floormod(task, self.shares)
        (_, first_head), kv, block = self._share(share), self.kv, self.single
        total = Records(registers((Records.size(kv.width),), "float32"), 0, kv.width)
        chunks = self._chunks(i, singles)
        first = T.cast(self.table[self._entry(1, i, 1)] * self.shares + share, "int64")
        parts = Records(records, first * (block.room * Records.size(kv.width)), kv.width)
        with T.serial(0, block.heads) as h:
            total.clear(0, self._sink(first_head + h))
            with T.serial(0, chunks) as chunk:
                total.merge(parts, 0, chunk * self.shares * block.room + h)
            total.finish(kv, 0, self.out, self.table[self._entry(1, i, 0)], (first_head + h) * kv.size)
