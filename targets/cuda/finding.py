"""What a warp finds in the tables of a step by votes of its lanes: each for itself, so that none waits for another.

Tables of a step are there before its first launch is: what is found here may be found before `after_launches`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import held, i32, local, shared, u32
from llmc.targets.cuda.prelude import bits_set, sync_warp, votes
from llmc.targets.cuda.sight import Places, held_int
from llmc.targets.cuda.target import WARP

AT_ONCE = 8  # rows that a lane reads before it counts them, of steps of many
FEW = 8  # rows of a sequence whose text is split; records of more would take much memory


class Finding:
    """Sequences and rows, as one of so many warps of a block looks for them."""

    def __init__(self, places: Places, thread: Any, warps: int) -> None:
        self.places = places
        self.warp, self.lane = T.floordiv(thread, WARP), T.floormod(thread, WARP)
        self.own = shared((warps, FEW), "int32")  # rows that a warp has found
        self.rows, self.sequences = held_int(places.seqs.shape[0]), held_int(places.indptr.shape[0] - 1)

    def sequence(self, part: Any) -> Any:
        """The sequence that a part is a chunk of."""
        count, found, part = local((1,), "int32"), local((1,), "int32"), held_int(part)
        T.buffer_store(count, i32(-1), [0])
        with T.serial(0, _turns(self.sequences), unroll=False) as turn:
            seq = held_int(turn * WARP + self.lane)
            T.buffer_store(found, i32(0), [0])
            with T.If(seq < self.sequences), T.Then():
                first = self.places.first_part(seq)
                T.buffer_store(found, T.Select(T.cast(first, "int32") <= part, i32(1), i32(0)), [0])
            T.buffer_store(count, count[0] + bits_set(held(votes(found[0] != 0), "uint32")), [0])
        return count[0]

    def few_rows(self, seq: Any) -> Any:
        """How many rows of this step are of a sequence, or some number above FEW; the first FEW of them in `row`."""
        count = local((1,), "int32")
        T.buffer_store(count, i32(0), [0])
        self._count(seq, count, i32(0), 1)
        step = AT_ONCE * WARP
        turns = T.floordiv(self.rows + (step - 1 - WARP), step)
        with T.serial(0, turns, unroll=False) as turn, T.If(count[0] <= FEW), T.Then():
            self._count(seq, count, turn * step + WARP, AT_ONCE)
        sync_warp()
        return count[0]

    def _count(self, seq: Any, count: Any, first: Any, turns: int) -> None:
        """Look at so many rows a lane, from `first` on, all read before the first is counted."""
        mine = local((turns,), "int32")
        rows = [held_int(first + turn * WARP + self.lane) for turn in range(turns)]
        for turn, row in enumerate(rows):
            T.buffer_store(mine, T.if_then_else(row < self.rows, self.places.seqs[row], -1), [turn])
        for turn, row in enumerate(rows):
            all_votes = held(votes(mine[turn] == seq), "uint32")
            before = (u32(1) << T.cast(self.lane, "uint32")) - u32(1)
            place = held_int(count[0] + bits_set(all_votes & before))
            with T.If(tirx.all(mine[turn] == seq, place < FEW)), T.Then():
                T.buffer_store(self.own, row, [self.warp, place])
            T.buffer_store(count, count[0] + bits_set(all_votes), [0])

    def row(self, number: Any) -> Any:
        """One of the rows that were found."""
        return self.own[self.warp, number]

    def written(self, pages: list[Any], most: int) -> list[Any]:
        """Whether a row of this step writes to a page, each; if there are more than so many rows, that one might."""
        places, page, late = self.places, local((1,), "int32"), local((len(pages),), "int32")
        many = T.Select(self.rows > most, i32(1), i32(0)) if places.slots is not None else i32(1)
        for which in range(len(pages)):
            T.buffer_store(late, many, [which])
        if places.slots is not None:
            with T.serial(0, T.Select(self.rows > most, i32(0), _turns(self.rows)), unroll=False) as turn:
                row = held_int(turn * WARP + self.lane)
                T.buffer_store(page, i32(-1), [0])
                with T.If(row < self.rows), T.Then():
                    T.buffer_store(page, places.page(places.seqs[row], places.slots[row]), [0])
                for which, one in enumerate(pages):
                    found = held(votes(page[0] == one), "uint32")
                    T.buffer_store(late, T.Select(found != u32(0), i32(1), late[which]), [which])
        return [late[which] != 0 for which in range(len(pages))]


def _turns(count: Any) -> Any:
    """In which a warp looks at so many."""
    return T.floordiv(count + (WARP - 1), WARP)
