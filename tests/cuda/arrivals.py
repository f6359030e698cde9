"""Counts of arrivals (`mbarrier`) for cuda_threads.py, and copies of whole pieces that they wait for.

All threads stand at the same statement: a thread that waits for a turn which nobody has ended by then waits for ever.
What tensor cores have read may be copied over once all warps of the block have arrived since, and one waited for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from thread_memory import NOBODY, Fault

from llmc.targets.cuda.target import WARP

Array = np.ndarray[Any, Any]
NAMES = ("llmc_begin_arrivals", "llmc_arrive", "llmc_wait_arrivals", "llmc_copy_whole")


@dataclass(eq=False)
class _Count:
    """One count of a block: so many that a turn waits for, so many still to come, and turns that are over."""

    needed: int
    left: int
    turns: int = 0
    coming: list[tuple[Any, slice]] = field(default_factory=list)  # what is copied in this turn
    readings: list[_Reading] = field(default_factory=list)  # whose warps have arrived here

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.left, self.turns = self.needed, self.turns + 1


@dataclass(eq=False)
class _Reading:
    """What tensor cores read: by which group of products, and which warps have arrived since that was done."""

    block: int
    memory: Any
    first: int
    last: int
    group: int
    warps: set[int] = field(default_factory=set)
    turn: int = -1  # of the count at which the last of them arrived


class Arrivals:
    """Those of one launch."""

    def __init__(self, warps: int) -> None:
        """`warps`: of a block."""
        self.warps = warps
        self.counts: dict[tuple[int, int, int], _Count] = {}
        self.readings: list[_Reading] = []
        self.done = 0  # groups of products that threads have waited for

    def begin(self, memory: Any, places: tuple[Array, Array, Array], count: int) -> None:
        """Turns of so many arrivals."""
        memory.write(*places, np.zeros(len(places[0]), memory.data.dtype))
        for space, at in zip(*places[:2], strict=True):
            self.counts[id(memory), int(space), int(at)] = _Count(count, count)

    def _found(self, memory: Any, places: tuple[Array, Array, Array]) -> list[_Count]:
        memory.read(*places)  # begun, and that behind a barrier
        return [self.counts[id(memory), int(space), int(at)] for space, at in zip(*places[:2], strict=True)]

    def read(self, memory: Any, space: Array, first: Array, last: Array, group: int) -> None:
        """Tensor cores read elements of each block."""
        for block in np.unique(space):
            own = space == block
            self.readings.append(_Reading(int(block), memory, int(first[own].min()), int(last[own].max()), group))

    def arrive(self, memory: Any, places: tuple[Array, Array, Array]) -> None:
        """Threads have come, and with each what its warp has done before."""
        for count, space, thread in zip(self._found(memory, places), *places[::2], strict=True):
            for reading in self.readings:
                if reading.block == space and reading.group < self.done:
                    reading.warps.add(int(thread) // WARP % self.warps)
                    if len(reading.warps) == self.warps and reading.turn < 0:
                        reading.turn = count.turns
                        count.readings.append(reading)
            count.arrive()

    def wait(self, memory: Any, places: tuple[Array, Array, Array], turns: Array) -> None:
        """Threads wait until a turn is over, or the one before it is not: turns are told apart by their last bit."""
        for count, space, turn in zip(self._found(memory, places), places[0], turns, strict=True):
            if count.turns % 2 == turn % 2:
                raise Fault(f"{memory.name}: a wait that never ends")
            over = [each for each in count.readings if each.turn < count.turns]
            self.readings = [each for each in self.readings if each not in over]
            count.readings = [each for each in count.readings if each not in over]
            if count.coming and (places[0] == space).sum() != self.warps * WARP:
                raise Fault(f"{memory.name}: only some threads of a block wait for what is copied")
            for copied, piece in count.coming:
                copied.written[space, piece], copied.writer[space, piece] = True, NOBODY
            count.coming = []

    def copy(self, to: Any, places: tuple[Array, Array, Array], values: Array, memory: Any, counts: Any) -> None:
        """values (threads, words) begin to come; each thread arrives."""
        for count, space, at, own in zip(self._found(memory, counts), *places[:2], values, strict=True):
            piece = slice(int(at), int(at) + len(own))
            if any(
                each.memory is to and each.block == space and each.first < piece.stop and each.last >= piece.start
                for each in self.readings
            ):
                raise Fault(f"{to.name}: copied over what tensor cores may still read")
            to.data[space, piece], to.written[space, piece] = own.view(to.data.dtype), False
            to.reader[space, piece], to.warp[space, piece] = NOBODY, NOBODY
            count.coming.append((to, piece))
            count.arrive()
