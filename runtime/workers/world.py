"""The processes that mpirun started, and how they wait for one another.

Every wait polls: who waits inside of MPI could not be told that another has died, and would burn a core.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from llmc.runtime.errors import ArtifactError

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # what mpirun of MPICH, of PMIx, of Open MPI sets
_OF_MPIRUN = ("PMI_", "PMIX_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_MCA_", "OMPI_UNIVERSE_", "PRTE_")
_SHARED = "/dev/shm/mpich_shm_"  # of MPICH
_BUSY_S, _SHORT_S = 0.002, 0.0002  # how long a wait polls without rest, and how long it rests then
_IDLE_S, _LONG_S = 1.0, 0.002  # after so long it rests longer
_LAST_WORDS_S = 0.2
_PATIENCE = 32  # a rest is this part, at most, of what was waited


def launched() -> bool:
    """Whether mpirun started this process."""
    return any(name in os.environ for name in _RANKS)


def rank_in(environment: Mapping[str, str]) -> int | None:
    """The rank of the process that mpirun gave this environment; None where it was not mpirun. Asks no MPI."""
    said = next((environment[name] for name in _RANKS if name in environment), "")
    return int(said) if said.isdecimal() else None


def rank_said() -> int | None:
    """The rank of this process, as `rank_in`."""
    return rank_in(os.environ)


def forget_mpirun() -> None:
    """Have processes that this one starts not take themselves for what mpirun started: they may run it themselves."""
    for name in [name for name in os.environ if name.startswith(_OF_MPIRUN)]:
        del os.environ[name]


def place() -> tuple[int, int]:
    """The rank of this process and how many there are; one alone where mpirun did not start it."""
    if not launched():
        return 0, 1
    world = _world()
    return world.rank, world.size


@cache
def mpi() -> Any:
    """The module of MPI. Raises ArtifactError where there is none."""
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # Leave does it
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ArtifactError(f"an artifact for several devices wants MPI: pip install 'llmc[mpi]' ({reason})") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # by which MPICH's mpirun tells of a death; it would end this one
    atexit.register(Leave.take)
    return MPI


def gathered() -> Any:
    """The communicator of all workers, once all have come so far: what they make together then keeps none waiting.

    Some may hash weights for long. Who waits is not stuck in MPI meanwhile: it heeds signals, and leaves its core free.
    """
    world = mpi().COMM_WORLD
    wait_until(world.Ibarrier().Test, lambda: None)
    return world


@cache
def _world() -> Any:
    """The communicator of all workers. Memory that MPI shares loses its name: who is killed from now on leaves none."""
    world = gathered()  # so all have mapped it
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if _SHARED in line}
    for path in paths:
        with contextlib.suppress(OSError):  # another one of this machine was quicker
            os.unlink(path)
    return world


def to_front(value: Any) -> list[Any] | None:
    """Every worker's value, in order of ranks, for the front; None for the others. All call it, when no team works."""
    found: list[Any] | None = gathered().gather(value)
    return found


class Leave:
    """How this process leaves MPI when it ends.

    MPI_Finalize waits for all, for ever where one has died; a process that ends without it has failed. So it is called
    once all are known to have done their work, and only then. MPICH's mpirun does not always notice who ends without
    it: where no launcher of ours looks after the others, it is told to end them.
    """

    allowed = False  # all have done their work
    looked_after = False  # a launcher knows of this process

    @classmethod
    def take(cls) -> None:
        """At the end of the process."""
        if cls.allowed:
            mpi().Finalize()
        else:
            cls.fail()

    @classmethod
    def fail(cls) -> None:
        """End all that mpirun started, this process too, once it has said why; nothing where a launcher does that."""
        if cls.looked_after:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        time.sleep(_LAST_WORDS_S)  # mpirun passes on nothing of who has told it to end all
        mpi().COMM_WORLD.Abort(1)


def wait_until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Come back when `done` says so; it is asked again and again, with rests that grow. `check` may raise meanwhile."""
    if done():
        return
    start = time.monotonic()
    while not done():
        check()
        os.sched_yield()  # where there are more workers than CPUs, one that has something to do goes first
        waited = time.monotonic() - start
        if waited > _BUSY_S:
            time.sleep(min(waited / _PATIENCE, _SHORT_S if waited < _IDLE_S else _LONG_S))
