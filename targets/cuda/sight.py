"""What the rows of a step see of their sequences, in CUDA kernels: which slots, how far away, in which pages.

A block finds it by itself: `seqs` tells of which sequence a row is, and a block's threads look through it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.launch import added, barrier, block_reduce, greater, i32, local, warp_reduce
from llmc.targets.cuda.prelude import sync_warp
from llmc.targets.cuda.target import WARP

CHUNK = 128  # slots whose scores are made at once; chunks begin at multiples of it, whoever looks at them
_NONE = 1 << 30  # a row that is not there


@dataclass(frozen=True)
class Places:
    """Tables of a step: rows (M,) of sequences `seqs`, whose pages are ids[indptr[s]:indptr[s + 1]].

    Row i stands at slots[i] and sees slots up to it, where not `causal` up to the last one of its sequence's rows; with
    `lengths` (S,) instead of slots, all so many of its sequence's source. With a window (not 0), those less than so
    many away. `holes` (S, 2) has the first slot of a sequence that none of its rows sees, and the one after the last.
    """

    seqs: Any
    indptr: Any
    ids: Any
    slots: Any = None
    lengths: Any = None
    holes: Any = None
    window: int = 0
    causal: bool = True

    @property
    def parts(self) -> Any:
        """At least as many as there are chunks in the pages of all sequences: what sizes of operands tell."""
        return T.floordiv(self.ids.shape[0], CHUNK // PAGE) + self.indptr.shape[0] - 1

    def page(self, seq: Any, slot: Any) -> Any:
        """The page that a slot of a sequence is in."""
        return self.ids[self.indptr[seq] + T.floordiv(slot, PAGE)]

    def first_part(self, seq: Any) -> Any:
        """Chunks of a sequence are parts from this number on; the next one's come after them."""
        return T.floordiv(self.indptr[seq], CHUNK // PAGE) + seq


def held_int(value: Any) -> Any:
    """An int32 computed once, to be read several times."""
    one = local((1,), "int32")
    T.buffer_store(one, T.cast(value, "int32"), [0])
    return one[0]


class Counting:
    """What threads of a block find together by looking at every number of a table, each at every so many-th."""

    def __init__(self, thread: Any, threads: int) -> None:
        self.thread, self.threads = thread, threads

    def over(self, count: Any, start: int, number: Callable[[Any], Any], combine: Callable[[Any, Any], Any]) -> Any:
        """number(i) of every i below `count` combined with `start`, in every thread of the block."""
        found = local((1,), "int32")
        T.buffer_store(found, i32(start), [0])
        steps = T.floordiv(count + (self.threads - 1), self.threads)
        with T.serial(0, T.cast(steps, "int32")) as step:
            i = step * self.threads + self.thread
            with T.If(i < count), T.Then():
                T.buffer_store(found, combine(found[0], number(i)), [0])
        block_reduce(found, 0, self.thread, self.threads, combine)
        return found[0]

    def where(self, count: Any, holds: Callable[[Any], Any]) -> Any:
        """For how many i below `count` it holds."""
        return self.over(count, 0, lambda i: T.Select(holds(i), i32(1), i32(0)), added)

    def rows(self, places: Places, seq: Any) -> Any:
        """How many rows of this step are of a sequence."""
        return self.where(places.seqs.shape[0], lambda i: places.seqs[i] == seq)

    def rows_of_each(self, places: Places, marked: Any, count: int, begin: Any) -> None:
        """In place of marks of rows from `begin` on, not 0, how many rows of this step are of that row's sequence.

        Each warp counts for other rows, so that no warp waits for another until all is counted.
        """
        warp, lane, rows = T.floordiv(self.thread, WARP), T.floormod(self.thread, WARP), places.seqs.shape[0]
        found = local((1,), "int32")
        with T.serial(0, -(-count // (self.threads // WARP)), unroll=False) as turn:
            own = held_int(turn * (self.threads // WARP) + warp)
            T.buffer_store(found, i32(0), [0])
            with T.If(tirx.all(own < count, marked[own] != 0)), T.Then():
                seq = held_int(places.seqs[begin + own])
                with T.serial(0, T.cast(T.floordiv(rows + (WARP - 1), WARP), "int32")) as step:
                    i = step * WARP + lane
                    with T.If(i < rows), T.Then():
                        T.buffer_store(found, found[0] + T.Select(places.seqs[i] == seq, i32(1), i32(0)), [0])
            warp_reduce(found, 0, added)
            sync_warp()
            with T.If(tirx.all(lane == 0, own < count)), T.Then():
                T.buffer_store(marked, found[0], [own])
        barrier()

    def next_row(self, places: Places, seq: Any, row: Any) -> Any:
        """The first row of a sequence after another row."""
        return self.over(
            places.seqs.shape[0], _NONE,
            lambda i: T.Select(tirx.all(places.seqs[i] == seq, i > row), i, i32(_NONE)), lambda a, b: T.min(a, b),
        )  # fmt: skip


class Sequence:
    """What the rows of one sequence share, in registers of every thread of the block."""

    def __init__(self, places: Places, seq: Any, counting: Counting) -> None:
        self.places = places
        self.start = held_int(places.indptr[seq])
        self.hole = [held_int(places.holes[seq, side]) for side in range(2)] if places.holes is not None else []
        if places.lengths is not None:
            self.last = held_int(places.lengths[seq] - 1)
        elif not places.causal:
            seqs, slots = places.seqs, places.slots
            self.last = counting.over(
                seqs.shape[0], 0, lambda i: T.if_then_else(seqs[i] == seq, slots[i], i32(0)), greater
            )  # fmt: skip

    def page(self, slot: Any) -> Any:
        """The page that a slot is in."""
        return self.places.ids[self.start + T.floordiv(slot, PAGE)]

    def hides(self, first: Any, count: int) -> Any:
        """Whether so many slots are all in the hole."""
        if not self.hole:
            return tirx.const(False)
        return tirx.all(first >= self.hole[0], first + count <= self.hole[1])

    @contextmanager
    def shown(self, chunk: Any) -> Iterator[None]:
        """Code for a chunk that is not all in the hole."""
        with T.If(tirx.Not(self.hides(chunk * CHUNK, CHUNK))), T.Then():
            yield

    def outside_hole(self, slot: Any) -> list[Any]:
        """Conditions that all hold if no hole hides a slot."""
        return [tirx.any(slot < self.hole[0], slot >= self.hole[1])] if self.hole else []


class Sight:
    """What one row of a sequence sees, in registers; of a row that is -1, nothing."""

    def __init__(self, sequence: Sequence, row: Any) -> None:
        self.sequence, places = sequence, sequence.places
        none = row < 0
        self.slot = i32(0)
        if places.slots is not None:
            self.slot = held_int(T.if_then_else(none, i32(0), places.slots[T.max(row, 0)]))
        causal = places.lengths is None and places.causal
        end = self.slot if causal else sequence.last
        if places.window and not causal:
            end = T.min(end, self.slot + (places.window - 1))
        self.end = held_int(T.Select(none, i32(-1), end))
        begin = T.max(self.slot - (places.window - 1), 0) if places.window else i32(0)
        self.begin = held_int(T.Select(none, i32(_NONE), begin))

    def sees(self, slot: Any) -> Any:
        """Whether the row attends to a slot."""
        seen = [slot <= self.end, *self.sequence.outside_hole(slot)]
        if self.sequence.places.window:
            seen.append(slot >= self.begin)
        return tirx.all(*seen) if len(seen) > 1 else seen[0]

    def place(self, slot: Any) -> Any:
        """How far after the row a slot is; a hole before the row takes its slots off that."""
        hole = self.sequence.hole
        if not hole:
            return slot - self.slot
        before = T.floordiv(slot, PAGE) * PAGE < hole[0]
        return slot - self.slot + T.Select(before, hole[1] - hole[0], i32(0))

    @property
    def chunks(self) -> tuple[Any, Any]:
        """The first chunk that the row sees something of, and the number after the last one."""
        return chunks_between(self.begin, self.end)


def chunks_between(begin: Any, end: Any) -> tuple[Any, Any]:
    """The first chunk with slots from `begin` to `end`, and the number after the last one; none if end is -1."""
    return T.floordiv(begin, CHUNK), T.floordiv(end, CHUNK) + 1
