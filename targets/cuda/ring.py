"""Weights that come to a warp all the time, on CUDA: slabs of one tile of outputs after another, some at once.

What is read is made room for at once. A warp's memory is full before it needs any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import held, i32, local
from llmc.targets.cuda.prelude import commit_copies, sync_warp, wait_copies
from llmc.targets.cuda.stream import Copied, Pieces, copy_words


@dataclass(frozen=True)
class Room:
    """Of a warp: units of so many slabs that are `together`, and units that have room."""

    together: int
    stages: int

    def words(self, pieces: Pieces) -> int:
        """Of shared memory."""
        return self.stages * self.together * sum(pieces.lengths)


class Ring:
    """A warp's memory, from word `first` of shared memory on."""

    def __init__(self, pieces: Pieces, matrix: Any, shared: Any, first: Any, room: Room, lane: Any) -> None:
        self.pieces, self.matrix, self.shared, self.first = pieces, matrix, shared, first
        self.room, self.lane, self.unit = room, lane, room.together * sum(pieces.lengths)
        self.has_head = pieces.format is not None and pieces.format.scale == "row"

    def begin(self, tile: Callable[[Any], Any], turns: Any, slab: Any, count: Any) -> None:
        """Let the first units come: of `turns` tiles, `count` slabs from `slab` on; `tile` gives that of a turn."""
        self.tile, self.slab, self.count = tile, slab, count
        self.left = held(T.cast(turns, "int32"), "int32")  # tiles that are to come
        self.ahead, self.stage = local((2,), "int32"), local((2,), "int32")  # turn and slab; stages of both ends
        for i in range(2):
            T.buffer_store(self.ahead, 0, [i])
            T.buffer_store(self.stage, 0, [i])
        if self.has_head:
            self.head, self.next_head = local((2,)), local((2,))
            self._read_head(0)
        for _ in range(self.room.stages):
            self._copy()

    def _read_head(self, turn: Any) -> None:
        """Begin to read what is needed when the next tile begins."""
        tile = self.tile(T.min(turn, self.left - 1))
        for i in range(2):
            row = T.floordiv(self.lane, 4) + 8 * i
            T.buffer_store(self.next_head, T.reinterpret("float32", held(self.matrix[tile, row], "int32")), [i])

    def begin_tile(self, turn: Any) -> None:
        """The units that come next are those of another tile."""
        self.now = held(T.cast(self.tile(turn), "int32"), "int32")
        if self.has_head:
            for i in range(2):
                T.buffer_store(self.head, self.next_head[i], [i])
            self._read_head(turn + 1)

    def arrive(self) -> None:
        """The next unit is there, for all lanes to read."""
        wait_copies(self.room.stages - 1)
        sync_warp()
        self.place = held(self.first + self.stage[0] * self.unit, "int32")

    def slab_of(self, unit: Any, own: Any) -> Copied:
        """Slab `own` of the unit that is there, which is number `unit` of its tile."""
        together = self.room.together
        slab = held(T.cast(self.slab + unit * together + own, "int32"), "int32")
        head = self.head if self.has_head else None
        return Copied(self.pieces, self.matrix, self.now, slab, self.shared, self.place, own, together, head)

    def leave(self) -> None:
        """All lanes have read the unit: another one comes in its place."""
        sync_warp()
        self._go_on(0)
        self._copy()

    def _go_on(self, end: int) -> None:
        last = self.room.stages - 1
        T.buffer_store(self.stage, T.Select(self.stage[end] == last, i32(0), self.stage[end] + 1), [end])

    def _copy(self) -> None:
        """One unit more, where there is one."""
        state, together = self.ahead, self.room.together
        place, tile = self.first + self.stage[1] * self.unit, self.tile(state[0])
        slabs = T.min(self.count - state[1], together)
        with T.If(state[0] < self.left), T.Then():
            self._copy_unit(tile, self.slab + state[1], place, slabs)
        commit_copies()
        T.buffer_store(state, state[1] + together, [1])
        with T.If(state[1] >= self.count), T.Then():
            T.buffer_store(state, 0, [1])
            T.buffer_store(state, state[0] + 1, [0])
        self._go_on(1)

    def _copy_unit(self, tile: Any, slab: Any, place: Any, slabs: Any) -> None:
        """Pieces of `slabs` slabs stand together, those of a slab apart."""
        together = self.room.together
        if self.pieces.joined:
            for start, length in zip(self.pieces.starts(slab), self.pieces.lengths, strict=True):
                self._copy_words(tile, start, place, length, slabs)
                place = place + together * length
            return
        for own in range(together):
            first = place
            for start, length in zip(self.pieces.starts(slab + own), self.pieces.lengths, strict=True):
                to = (self.shared, first + own * length)
                copy_words(self.pieces, self.matrix, tile, start, to, (length, own < slabs), self.lane)
                first = first + together * length

    def _copy_words(self, tile: Any, start: Any, place: Any, length: int, slabs: Any) -> None:
        """Neighbouring pieces of a unit; mostly of a whole one."""
        together = self.room.together
        to = (self.shared, place)

        def copy(count: int) -> None:
            copy_words(self.pieces, self.matrix, tile, start, to, (count * length, True), self.lane)

        with T.If(slabs == together):
            with T.Then():
                copy(together)
            with T.Else():
                for count in range(1, together):
                    with T.If(slabs == count), T.Then():
                        copy(count)
