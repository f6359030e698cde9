"""What a worker has of the others: the messages of the front, and the collectives that compiled modules call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import WorkerLost
from llmc.runtime.loading.device_manifest import DeviceManifest
from llmc.runtime.loading.library import import_ffi
from llmc.runtime.workers.watch import Watch
from llmc.runtime.workers.world import forget_files, mpi, wait_until

Array = NDArray[Any]


class Team:
    """The workers of an artifact, seen from one of them. Made by all at once; one lives in a process at a time.

    Rank 0 is the front: it tells the others what to do, in an order that they keep.
    """

    def __init__(self, manifest: DeviceManifest) -> None:
        world = mpi().COMM_WORLD
        self.rank, self.size = manifest.rank, len(manifest.ranks)
        self._control, self._answers, self._post = world.Dup(), world.Dup(), world.Dup()
        self._stage = world.Split(manifest.ranks[self.rank].stage, self.rank)
        forget_files(world)
        self.watch = Watch(world, [each.device for each in manifest.ranks])
        self._sent: list[tuple[Any, Any]] = []  # requests that may be under way still, and what they read
        ffi = import_ffi()
        for function in (self._all_reduce, self._all_gather, self._send, self._recv):
            ffi.register_global_func(f"llmc.{function.__name__[1:]}", function, override=True)

    def tell(self, *message: Any) -> None:
        """Leave a message for each of the others."""
        for rank in range(self.size):
            if rank != self.rank:
                self._keep(self._control.isend(message, rank), message)

    def told(self) -> tuple[Any, ...]:
        """The front's next message; waits for it."""
        return self._received(self._control, 0)

    def give(self, answer: list[Array]) -> None:
        """Leave an answer for the front."""
        self._keep(self._answers.isend(answer, 0), answer)

    def given(self, rank: int) -> list[Array]:
        """The next answer of a rank; waits for it."""
        return self._received(self._answers, rank)

    def close(self) -> None:
        """Wait until all that was sent has arrived, and until all others are here; nobody is watched from then on."""
        with contextlib.suppress(WorkerLost):  # of the last calls of all: who comes through first may end first
            self._leave()
        self.watch.close()

    def _leave(self) -> None:
        self.watch.expect_end()
        for request, _ in self._sent:
            self._wait(request.Test)
        self._sent.clear()
        self._wait(self._control.Ibarrier().Test)

    def _wait(self, done: Callable[[], bool]) -> None:
        wait_until(done, self.watch.check)

    def _received(self, communicator: Any, source: int) -> Any:
        found: list[Any] = []

        def arrived() -> bool:
            message = communicator.improbe(source)
            if message is not None:
                found.append(message.recv())
            return bool(found)

        self._wait(arrived)
        return found[0]

    def _keep(self, request: Any, data: Any) -> None:
        self._sent = [each for each in self._sent if not each[0].Test()]
        self._sent.append((request, data))

    # What modules call: tensors of TVM in, results written to the last one (passes/partition, docs/partition.md).

    def _all_reduce(self, x: Any, group: int, out: Any) -> None:
        """Gathered and added in order of ranks: sums that MPI makes may follow the place in the buffer."""
        own, total = np.from_dlpack(x), np.from_dlpack(out)
        parts = np.empty((self._stage.size, *own.shape), own.dtype)
        self._wait(self._stage.Iallgather(np.ascontiguousarray(own), parts).Test)
        np.copyto(total, parts[0])
        for part in parts[1:]:
            np.add(total, part, out=total)

    def _all_gather(self, x: Any, group: int, width: int, out: Any) -> None:
        own, whole = np.ascontiguousarray(np.from_dlpack(x)), np.from_dlpack(out)
        rows, columns = own.shape
        widths = np.empty(self._stage.size, np.int64)
        self._wait(self._stage.Iallgather(np.array([columns], np.int64), widths).Test)
        if widths.sum() != width:
            raise RuntimeError(f"all_gather: {widths.sum()} columns of the devices together, wanted {width}")
        flat = np.empty(rows * width, own.dtype)
        counts = (rows * widths).tolist()
        self._wait(self._stage.Iallgatherv(own, [flat, counts]).Test)
        start = 0
        for count, wide in zip(counts, widths.tolist(), strict=True):
            at = start // rows
            whole[:, at : at + wide] = flat[start : start + count].reshape(rows, wide)
            start += count

    def _send(self, x: Any, to: int, out: Any) -> None:
        if to >= 0:
            data = np.from_dlpack(x).copy()  # x may be overwritten before the other takes it
            self._keep(self._post.Isend(data, to), data)
        np.from_dlpack(out)[:] = 0

    def _recv(self, like: Any, source: int, width: int, out: Any) -> None:
        self._wait(self._post.Irecv(np.from_dlpack(out), source).Test)
