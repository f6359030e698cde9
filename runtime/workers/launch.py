"""Starts the workers of an artifact by mpirun, looks after them, and says what went wrong first."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading.device_manifest import read_device_manifest
from llmc.runtime.loading.package import DEVICES, read_document
from llmc.runtime.workers.member import ADDRESS
from llmc.runtime.workers.pass_on import PassOn, feed
from llmc.runtime.workers.roll import Roll, started

_TICK_S = 0.2  # how often mpirun itself is looked at
_START_S = 2.0  # workers begin within so long of each other, or it is found out why not
_GRACE_S = 0.5  # to end by themselves, once one has failed
_STOP_S = 1.0  # then, once told to
_SHORT_S = 0.01
_SHARED = ("mpich_shm_*", "sm_segment.*", "ucx_shm_posix_*")  # of MPICH, of Open MPI, of what both may use
_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def launch(
    path: str | os.PathLike[str], module: str, arguments: Sequence[str], shown: Callable[[str], str] | None = None
) -> tuple[int, str | None]:
    """Run `python -m module` with these arguments in a process for each device of the artifact, until all have ended.

    Standard streams are those of rank 0; what it writes goes through `shown`, if given. Returns the exit code, and what
    went wrong first, for the caller to say. Whatever ends this call, or this process, ends the workers. Raises
    ArtifactError for an artifact of one device, or where there is no mpirun that would start it.
    """
    folder = Path(path).resolve()
    if DEVICES not in read_document(folder):
        raise ArtifactError(f"{folder}: compiled for one device; run it without --devices, or compile it with it")
    devices = [each.device for each in read_device_manifest(folder).ranks]
    command = [*mpirun(), "-n", str(len(devices)), sys.executable, "-m", module, *arguments]
    littered = _shared()
    with selectors.DefaultSelector() as ready:
        roll = Roll(devices, ready)
        process = _spawn(command, roll.environment)
        try:
            _follow(process, roll, ready, shown)
        finally:
            _end(process, roll)
            if roll.failed or process.returncode:
                _sweep(littered)
    return roll.code, roll.error


def mpirun() -> list[str]:
    """mpirun, of the environment this Python is of, else the one on PATH, and the options it wants.

    Raises ArtifactError where there is none that would start anything.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise ArtifactError("--devices wants mpirun, which is not on PATH: pip install mpich, or your system's MPI")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said and "Open RTE" not in said:
        return [found]
    if os.geteuid() == 0 and any(os.environ.get(name) != "1" for name in _ROOT):
        raise ArtifactError(f"Open MPI's mpirun starts nothing as root, unless {'=1 and '.join(_ROOT)}=1 are set")
    # As MPICH's does it: any number of workers, on any core; what they are to know reaches other hosts too.
    return [found, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-x", ADDRESS]


def _spawn(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """mpirun, in a session of its own: Ctrl-C at a terminal reaches this process alone, which ends the others."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    terminal = os.isatty(0)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE if terminal else None, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip
    if process.stdin is not None:
        feed(process.stdin)
    return process


def _follow(
    process: subprocess.Popen[bytes], roll: Roll, ready: selectors.BaseSelector, shown: Callable[[str], str] | None
) -> None:
    """Pass on what workers write, and listen to them, until mpirun has ended, or has to be ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = (PassOn(process.stdout, 1, shown), PassOn(process.stderr, 2, None))
    pipes = set(streams)

    def pass_on(pipe: PassOn) -> None:
        if not pipe.more():
            ready.unregister(pipe)
            pipes.discard(pipe)

    for pipe in pipes:
        ready.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: pass_on(pipe))
    check, until = time.monotonic() + _START_S, float("inf")
    while (pipes or roll.connected or process.poll() is None) and time.monotonic() < until:
        for key, _ in ready.select(_TICK_S):  # in the order in which they became ready: so does epoll have them
            key.data()
        if roll.waiting and time.monotonic() > check:
            roll.check_start()
            check = time.monotonic() + _START_S
        if (roll.failed or process.poll() is not None) and until == float("inf"):
            until = time.monotonic() + _GRACE_S
    roll.finish(process.poll() or 0)
    if not roll.explained or os.environ.get("LLMC_DEBUG", "0") not in ("", "0"):
        os.write(2, b"".join(stream.withheld for stream in streams))


def _end(process: subprocess.Popen[bytes], roll: Roll) -> None:
    """End mpirun and all workers, those that do not listen as well."""
    hard = roll.failed or process.poll() != 0
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
    roll.close()  # which ends workers that no signal reaches
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    if process.poll() is None:
        _signal(process, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + _STOP_S
    while hard and (left := started(roll.token)) and time.monotonic() < until:  # a killed one takes a while to be gone
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SHORT_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _signal(process: Any, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # it was quicker
        os.killpg(process.pid, number)


def _shared() -> set[Path]:
    """Memory of MPI that has a name, on this machine."""
    return {path for names in _SHARED for path in Path("/dev/shm").glob(names)}


def _sweep(before: set[Path]) -> None:
    """Take away what killed workers have left in shared memory: what is new, ours, and in no use."""
    new = _shared() - before
    if not new:
        return
    used = "".join(_maps(folder) for folder in Path("/proc").glob("[0-9]*"))
    for path in new:
        with contextlib.suppress(OSError):
            if str(path) not in used and path.stat().st_uid == os.geteuid():
                path.unlink()


def _maps(folder: Path) -> str:
    try:
        return (folder / "maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
