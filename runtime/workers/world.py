"""The processes that mpirun started, and how they wait for one another.

Every wait polls: who waits inside of MPI could not be told that another has died, and would burn a core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from llmc.runtime.errors import ArtifactError

_MARKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # what mpirun of MPICH, of PMIx, of Open MPI sets
_SHARED = "/dev/shm/mpich_shm_"  # of MPICH
_BUSY_S, _SHORT_S = 0.002, 0.0002  # how long a wait polls without rest, and how long it rests then
_IDLE_S, _LONG_S = 1.0, 0.002  # after so long it rests longer


def launched() -> bool:
    """Whether mpirun started this process."""
    return any(mark in os.environ for mark in _MARKS)


def place() -> tuple[int, int]:
    """The rank of this process and how many there are; one alone where mpirun did not start it."""
    if not launched():
        return 0, 1
    world = mpi().COMM_WORLD
    return world.rank, world.size


def mpi() -> Any:
    """The module of MPI. Raises ArtifactError where there is none."""
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # it waits for all, for ever where one has ended; whoever is done just ends
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ArtifactError(f"an artifact for several devices wants MPI: pip install 'llmc[mpi]' ({reason})") from error
    return MPI


def forget_files(world: Any) -> None:
    """Take away the names of memory that MPI shares, once all have mapped it: a killed process leaves none behind."""
    world.Barrier()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if _SHARED in line}
    for path in paths:
        with contextlib.suppress(OSError):  # another one of this machine was quicker
            os.unlink(path)
    world.Barrier()


def wait_until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Come back when `done` says so; it is asked again and again, with rests that grow. `check` may raise meanwhile."""
    start = time.monotonic()
    while not done():
        check()
        waited = time.monotonic() - start
        if waited > _BUSY_S:
            time.sleep(_SHORT_S if waited < _IDLE_S else _LONG_S)
