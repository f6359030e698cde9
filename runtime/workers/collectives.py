"""The collectives that compiled modules call: tensors of TVM in, results written to the last one (docs/partition.md).

All is sent from one to one: two workers of a stage then need one exchange, and nobody waits within MPI. Sums are made
here, for each number in order of ranks: those that MPI makes may follow the place in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.loading.library import import_ffi
from llmc.runtime.workers.world import mpi

Array = NDArray[Any]
Keep = Callable[[Any, Any], None]
Wait = Callable[[Callable[[], bool]], None]

_SLICED_BYTES = 1 << 16  # from here on more than two workers add a slice each, and exchange the sums


class Memory(Protocol):
    """Tensors of a module as arrays of the host, which is where workers exchange them."""

    def given(self, x: Any) -> Array:
        """What a tensor has. It may be overwritten once the collective has been done."""
        ...

    def room(self, out: Any) -> Array:
        """An array for what a tensor is to have."""
        ...

    def put(self, out: Any, array: Array) -> None:
        """Have the tensor be what its `room` has now."""
        ...


class HostMemory:
    """Tensors that are arrays of the host already."""

    given = room = staticmethod(np.from_dlpack)

    @staticmethod
    def put(out: Any, array: Array) -> None:
        """It is there."""


class Group:
    """Workers that send each other arrays of the host. `wait` comes back when what it is given says so."""

    def __init__(self, communicator: Any, wait: Wait) -> None:
        self._communicator, self.wait = communicator, wait
        self.rank, self.size = int(communicator.rank), int(communicator.size)
        self.others = [rank for rank in range(self.size) if rank != self.rank]

    def of_all(self, array: Array) -> list[Array]:
        """What each gives, arrays of one size; all call it at once."""
        parts = [array] * self.size
        for rank in self.others:
            parts[rank] = np.empty_like(array)
        self.exchange([array] * len(parts), parts)
        return parts

    def exchange(self, to: list[Array], into: list[Array], statuses: Sequence[Any] = ()) -> None:
        """Send each of the others its array, and receive one from each; `statuses` are told what came, by rank."""
        communicator, others, wait = self._communicator, self.others, self.wait
        coming = [communicator.Irecv(into[rank], rank) for rank in others]
        going = [communicator.Isend(to[rank], rank) for rank in others]
        for rank, request in zip(others, coming, strict=True):
            wait(partial(request.Test, statuses[rank]) if statuses else request.Test)
        for request in going:
            wait(request.Test)


class Collectives:
    """What a worker does with those of its stage, and with the stages before and behind.

    stage: a communicator of the stage alone. post: one of all, for what goes from stage to stage. wait: comes back when
    what it is given says so. keep: holds a request and what it reads until it is done.
    """

    def __init__(self, stage: Any, post: Any, wait: Wait, keep: Keep) -> None:
        self.stage, self.everyone = Group(stage, wait), Group(post, wait)
        self._post, self._wait, self._keep = post, wait, keep
        self._memory: Memory

    def register(self, memory: Memory) -> None:
        """Be what modules of this process call, with tensors in this memory; to be done before one is loaded."""
        self._memory, ffi = memory, import_ffi()
        for name in ("all_reduce", "all_gather", "send", "recv"):
            ffi.register_global_func(f"llmc.{name}", getattr(self, name), override=True)

    def all_reduce(self, x: Any, group: int, out: Any) -> None:
        """The sum over the stage."""
        own, total = self._memory.given(x), self._memory.room(out)
        if len(self.stage.others) > 1 and own.nbytes >= _SLICED_BYTES:
            self._add_slices(own.reshape(-1), total.reshape(-1))
        else:
            _add(self.stage.of_all(own), total)
        self._memory.put(out, total)

    def all_gather(self, x: Any, group: int, width: int, out: Any) -> None:
        """Columns side by side."""
        own, whole = self._memory.given(x), self._memory.room(out)
        rows, columns = own.shape
        parts = [np.empty(rows * (width - columns), own.dtype) for _ in range(self.stage.size)]
        statuses = [mpi().Status() for _ in parts]
        self.stage.exchange([own] * len(parts), parts, statuses)
        counts = [status.Get_count(mpi().FLOAT) for status in statuses]  # which tell how many columns each has
        start = 0
        for rank, (part, count) in enumerate(zip(parts, counts, strict=True)):
            each = own if rank == self.stage.rank else part[:count].reshape(rows, -1)
            if start + each.shape[1] <= width:
                whole[:, start : start + each.shape[1]] = each
            start += each.shape[1]
        if start != width:
            raise RuntimeError(f"all_gather: {start} columns of the devices together, wanted {width}")
        self._memory.put(out, whole)

    def send(self, x: Any, to: int, out: Any) -> None:
        """To a rank of the next stage; it is taken when that one comes to it."""
        if to >= 0:
            data = self._memory.given(x).copy()  # x may be overwritten before the other takes it
            self._keep(self._post.Isend(data, to), data)
        zero = self._memory.room(out)
        zero[:] = 0
        self._memory.put(out, zero)

    def recv(self, like: Any, source: int, width: int, out: Any) -> None:
        """From a rank of a stage before."""
        array = self._memory.room(out)
        self._wait(self._post.Irecv(array, source).Test)
        self._memory.put(out, array)

    def _add_slices(self, own: Array, total: Array) -> None:
        """Each adds a slice of all, and gives the sum to all: (n - 1) / n of x is sent twice, not n - 1 times."""
        size = self.stage.size
        ends = [own.size * rank // size for rank in range(size + 1)]
        slices = [slice(first, end) for first, end in zip(ends, ends[1:], strict=False)]
        mine = slices[self.stage.rank]
        parts = [np.empty_like(total[mine]) for _ in slices]
        parts[self.stage.rank] = own[mine]
        self.stage.exchange([own[each] for each in slices], parts)
        _add(parts, total[mine])
        self.stage.exchange([total[mine]] * size, [total[each] for each in slices])


def _add(parts: list[Array], total: Array) -> None:
    """The sum of all parts, in their order."""
    first, *others = parts
    if not others:
        np.copyto(total, first)
    for part in others:
        np.add(first, part, out=total)
        first = total
