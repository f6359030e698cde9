"""What a worker has of the others: the messages of the front, and answers to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from llmc.runtime.index_arrays import aligned
from llmc.runtime.loading.device_manifest import DeviceManifest
from llmc.runtime.workers.calls import ANSWER, Array, Message, packed, unpacked
from llmc.runtime.workers.collectives import Collectives
from llmc.runtime.workers.watch import Watch
from llmc.runtime.workers.world import Leave, gathered, mpi, wait_until


class Awaited:
    """An answer that the front will want. Who lets go of it before it has come gets none."""

    def __init__(self) -> None:
        self.arrays: list[Array] | None = None


class Team:
    """The workers of an artifact, seen from one of them. Made by all at once; one lives in a process at a time.

    Rank 0 is the front: it tells the others what to do, in an order that they keep.
    """

    def __init__(self, manifest: DeviceManifest) -> None:
        world = gathered()
        self.rank, self.size = manifest.rank, len(manifest.ranks)
        self._control, self._answers, post = world.Dup(), world.Dup(), world.Dup()
        stage = world.Split(manifest.ranks[self.rank].stage, self.rank)
        self.watch = Watch(world, [each.device for each in manifest.ranks])
        Leave.allowed = False  # though an artifact before this one ended well
        self._sent: list[tuple[Any, Any]] = []  # requests that may be under way still, and what they read
        self._awaited: WeakValueDictionary[int, Awaited] = WeakValueDictionary()  # number of a call -> its answer
        self.collectives = Collectives(stage, post, self._wait, self._keep)

    def least(self, number: int) -> int:
        """The least of what all workers say, which all ask at once."""
        own, found = np.array([number], np.int64), np.empty(1, np.int64)
        self._wait(self._control.Iallreduce(own, found, mpi().MIN).Test)
        return int(found[0])

    def tell(self, kind: int, numbers: Sequence[int] = (), arrays: Sequence[Array] = ()) -> None:
        """Leave a message for each of the others."""
        message = packed(kind, numbers, arrays)
        for rank in range(self.size):
            if rank != self.rank:
                self._keep(self._control.Isend(message, rank), message)

    def told(self) -> Message:
        """The front's next message; waits for it."""
        found: list[Message] = []

        def arrived() -> bool:
            found.extend(self._received(self._control, 0))
            return bool(found)

        self._wait(arrived)
        return found[0]

    def give(self, number: int, answer: Sequence[Array]) -> None:
        """Leave an answer for the front, to the call of this number."""
        message = packed(ANSWER, [number], answer)
        self._keep(self._answers.Isend(message, 0), message)

    def awaiting(self, number: int) -> Callable[[], list[Array]]:
        """What waits for the answer to a call, which may be another time."""
        answer = self._awaited[number] = Awaited()

        def wait() -> list[Array]:
            def arrived() -> bool:
                if answer.arrays is None:
                    self._take_answers()
                return answer.arrays is not None

            self._wait(arrived)
            assert answer.arrays is not None
            return answer.arrays

        return wait

    def close(self) -> None:
        """Wait until all that was sent has arrived, and until all others are here; nobody is watched from then on."""
        for request, _ in self._sent:
            self._wait(lambda request=request: self._over(request))  # type: ignore[misc]
        self._sent.clear()
        barrier = self._control.Ibarrier()
        self._wait(lambda: self._over(barrier))
        Leave.allowed = True
        self.watch.close()

    def _over(self, request: Any) -> bool:
        self._take_answers()  # of calls that nobody waited for
        return bool(request.Test())

    def _take_answers(self) -> None:
        """Receive an answer, if one is there."""
        for message in self._received(self._answers, mpi().ANY_SOURCE) if self.rank == 0 else ():
            answer = self._awaited.get(message.numbers[0])
            if answer is not None:
                answer.arrays = message.arrays

    def _wait(self, done: Callable[[], bool]) -> None:
        wait_until(done, self.watch.check)

    def _received(self, communicator: Any, source: int) -> list[Message]:
        """A message, if one is there."""
        status = mpi().Status()
        found = communicator.Improbe(source, status=status)
        if found is None:
            return []
        (whole,) = aligned([status.Get_count(mpi().INT32_T)])
        self._wait(found.Irecv(whole).Test)
        return [unpacked(whole)]

    def _keep(self, request: Any, data: Any) -> None:
        self._sent = [each for each in self._sent if not each[0].Test()]
        self._sent.append((request, data))
