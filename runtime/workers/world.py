"""The processes that mpirun started, and how they wait for one another.

Every wait polls: who waits inside of MPI could not be told that another has died, and would burn a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from llmc.runtime.errors import ArtifactError

_MARKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # what mpirun of MPICH, of PMIx, of Open MPI sets
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
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ArtifactError(f"an artifact for several devices wants MPI: pip install 'llmc[mpi]' ({reason})") from error
    return MPI


def wait_until(done: Callable[[], bool]) -> None:
    """Come back when `done` says so; it is asked again and again, with rests that grow."""
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > _BUSY_S:
            time.sleep(_SHORT_S if waited < _IDLE_S else _LONG_S)
