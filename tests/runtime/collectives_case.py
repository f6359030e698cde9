"""Collectives between the processes that mpirun started, against what they mean; each says "equal" at its end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.runtime.workers.collectives import Collectives, HostMemory
from llmc.runtime.workers.world import Leave, mpi


def wait(done: Callable[[], bool]) -> None:
    while not done():
        pass


def main() -> None:
    world = mpi().COMM_WORLD
    size, rank = world.size, world.rank
    kept = []
    collectives = Collectives(world, world.Dup(), wait, lambda *sent: kept.append(sent))
    collectives.register(HostMemory())
    random = np.random.default_rng(0)  # of the same numbers everywhere
    for rows in (1, 3, 50, 257):
        parts = random.standard_normal((size, rows, 131)).astype(np.float32)
        parts *= np.float32(10.0) ** random.integers(-3, 4, (size, 1, 1)).astype(np.float32)
        found = np.empty((rows, 131), np.float32)
        collectives.all_reduce(parts[rank], 0, found)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        np.testing.assert_array_equal(found, total)
        widths = [16 * (1 + number) for number in range(size)]
        columns = [random.standard_normal((rows, width)).astype(np.float32) for width in widths]
        whole = np.empty((rows, sum(widths)), np.float32)
        collectives.all_gather(columns[rank], 0, sum(widths), whole)
        np.testing.assert_array_equal(whole, np.hstack(columns))
        sent, zero, got = parts[rank].copy(), np.ones(1, np.int32), np.empty((rows, 131), np.float32)
        collectives.send(sent, (rank + 1) % size, zero)
        sent[:] = -1  # as it may be once it was sent
        collectives.recv(sent, (rank - 1) % size, 131, got)
        np.testing.assert_array_equal(got, parts[(rank - 1) % size])
        assert not zero.any()
    for request, _ in kept:
        wait(request.Test)
    print("equal", flush=True)
    wait(world.Ibarrier().Test)
    Leave.allowed = True


main()
