"""Memory of a launch that cuda_threads.py runs: what is in it, and who touched each element since the last barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.targets.cuda.target import WARP

Array = np.ndarray[Any, Any]
NOBODY, MANY = -1, -2
OF_WARP = -3  # and below: threads of warp 0 and so on, before a barrier of that warp


def _others(touched: Array, thread: Array) -> Array:
    """Where somebody has touched an element who is neither the thread nor, before a barrier, of its warp."""
    return (touched != NOBODY) & (touched != thread) & (touched != OF_WARP - thread // WARP)


class Fault(AssertionError):
    """What is wrong with a kernel."""


class Memory:
    """A buffer of a launch, in one or more copies, and who touched each element since the last barrier.

    `written`: which elements somebody has written, in this launch or before; None if all are.
    """

    def __init__(self, name: str, shape: tuple[int, ...], data: Array, scope: str, written: Array | None) -> None:
        self.name, self.shape, self.data, self.scope = name, shape, data, scope  # data: (spaces, elements)
        self.written = written
        if scope != "local":
            self.reader, self.writer = (np.full(data.shape, NOBODY, np.int64) for _ in range(2))
        if scope == "shared":
            self.warp = np.full(data.shape, NOBODY, np.int64)  # of those who read

    def forget(self, spaces: Array) -> None:
        """A barrier of these copies."""
        if self.scope != "local":
            self.reader[spaces], self.writer[spaces] = NOBODY, NOBODY

    def forget_warps(self, warps: Array) -> None:
        """A barrier of each of these warps: for its own threads what they did before is past."""
        read = (self.reader != NOBODY) & np.isin(self.warp, warps)
        self.reader[read] = OF_WARP - self.warp[read]
        written = (self.writer >= 0) & np.isin(self.writer // WARP, warps)
        self.writer[written] = OF_WARP - self.writer[written] // WARP

    def begin_again(self, spaces: Array) -> None:
        """Where a loop comes back to the same shared memory: nothing is written, but who touched it is known."""
        assert self.written is not None
        self.written[spaces] = False

    def read(self, space: Array, at: Array, thread: Array) -> Array:
        if self.written is not None and not self.written[space, at].all():
            raise Fault(f"{self.name}: read before it is written")
        if self.scope != "local":
            writer = self.writer[space, at]
            if _others(writer, thread).any():
                raise Fault(f"{self.name}: read in a race with a write of another thread")
            before = self.reader[space, at]
            self.reader[space, at] = np.where(_others(before, thread), MANY, thread)
            shared = self.reader[space, at] != thread
            self.reader[space[shared], at[shared]] = MANY
        if self.scope == "shared":
            warp, of = thread // WARP, self.warp[space, at]
            of = np.where(before == NOBODY, NOBODY, of)
            self.warp[space, at] = warp
            several = (self.warp[space, at] != warp) | ((of != NOBODY) & (of != warp))
            self.warp[space[several], at[several]] = MANY
        values: Array = self.data[space, at]
        return values

    def write(self, space: Array, at: Array, thread: Array, values: Array, written: bool = True) -> None:
        """Values by a thread each; `written` False: they are not there yet."""
        if self.scope != "local":
            reader, writer = self.reader[space, at], self.writer[space, at]
            self.writer[space, at] = thread
            others = _others(reader, thread) | _others(writer, thread)
            if others.any() or (self.writer[space, at] != thread).any():
                raise Fault(f"{self.name}: written in a race with another thread")
        self.data[space, at] = values
        if self.written is not None:
            self.written[space, at] = written


@dataclass
class Copies:
    """What threads have begun to copy: of each, the group of its thread's copies that it belongs to."""

    memory: Memory
    place: tuple[Array, Array, Array]  # space, element, thread
    group: Array

    def arrive(self, done: Array) -> Copies:
        """Some of them are there; gives the others."""
        space, at, thread = (part[done] for part in self.place)
        assert self.memory.written is not None
        self.memory.written[space, at], self.memory.writer[space, at] = True, thread
        return Copies(self.memory, tuple(part[~done] for part in self.place), self.group[~done])  # type: ignore[arg-type]
