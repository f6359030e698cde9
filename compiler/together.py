"""Runs the modules of several devices in one process, a thread each, with collectives in NumPy: slow and obvious.

It is what a partitioned model means, and what workers that run it for real are tested against.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, Queue
from typing import Any, TypeVar

from numpy.typing import NDArray

from llmc.compiler.errors import LlmcError
from llmc.compiler.meaning.collective import entered

WAIT = 60.0  # seconds that a device waits for another before it gives up

Result = TypeVar("Result")


class _Room:
    """Where the devices of one run meet."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        count = sum(map(len, groups))
        self.groups = groups
        self.given: list[NDArray[Any] | None] = [None] * count
        self.barriers = [threading.Barrier(len(group)) for group in groups]
        self.post: dict[tuple[int, int], Queue[NDArray[Any]]] = {
            (source, to): Queue() for source in range(count) for to in range(count)
        }
        self.broken = threading.Event()

    def give_up(self) -> None:
        """Nobody waits any longer: one of the devices has failed."""
        self.broken.set()
        for barrier in self.barriers:
            barrier.abort()


class _Seat:
    """One device's way to the others (`Others` of compiler/meaning/collective.py)."""

    def __init__(self, room: _Room, rank: int) -> None:
        self.room, self.rank = room, rank

    def gather(self, x: NDArray[Any], group: int) -> list[NDArray[Any]]:
        room, ranks = self.room, self.room.groups[group]
        if self.rank not in ranks:
            raise LlmcError(f"rank {self.rank} in a collective of group {group}, which is {list(ranks)}")
        room.given[self.rank] = x.copy()
        self._meet(group)
        found = [given for rank in ranks if (given := room.given[rank]) is not None]
        self._meet(group)  # before anybody gives the next
        return found

    def _meet(self, group: int) -> None:
        try:
            self.room.barriers[group].wait(WAIT)
        except threading.BrokenBarrierError:
            raise LlmcError(f"rank {self.rank}: another device of group {group} did not come") from None

    def send(self, x: NDArray[Any], to: int) -> None:
        self.room.post[self.rank, to].put(x.copy())

    def receive(self, source: int) -> NDArray[Any]:
        for _ in range(int(10 * WAIT)):
            try:
                return self.room.post[source, self.rank].get(timeout=0.1)
            except Empty:
                if self.room.broken.is_set():
                    break
        raise LlmcError(f"rank {self.rank}: nothing came from rank {source}")


def together(groups: Sequence[Sequence[int]], runs: Sequence[Callable[[], Result]]) -> list[Result]:
    """What each run gives, run rank by rank at the same time. `groups` are the ranks of each group, all in one.

    Raises what the first device that failed raised, and no device is left waiting.
    """
    if sorted(rank for group in groups for rank in group) != list(range(len(runs))):
        raise LlmcError(f"groups {[list(group) for group in groups]} of {len(runs)} devices")
    room, first = _Room(groups), Queue[BaseException]()

    def run(rank: int) -> Result:
        try:
            with entered(_Seat(room, rank)):
                return runs[rank]()
        except BaseException as error:
            first.put(error)
            room.give_up()
            raise

    with ThreadPoolExecutor(len(runs), "device") as pool:
        futures = [pool.submit(run, rank) for rank in range(len(runs))]
        wait(futures)
    if not first.empty():
        raise first.get()
    if any(not queue.empty() for queue in room.post.values()):
        raise LlmcError("a device sent what no other took")
    return [future.result() for future in futures]
