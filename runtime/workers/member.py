"""A worker's connection to the launcher that started it (`llmc run --devices`): what went wrong is said there, once.

The system closes the connection of who dies, so the launcher knows; and so do workers whose launcher has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from llmc.runtime.workers.world import Leave, rank_said

ADDRESS = "LLMC_LAUNCHER"  # in the environment of a worker: host:port:token
_CONNECT_S = 20.0
_MOST_TEXT = 4000  # characters of a complaint

_way: list[socket.socket] = []  # the connection, where there is one


@contextlib.contextmanager
def membership() -> Iterator[None]:
    """Be known to the launcher, if one started this process, from here to the end; to be begun before all else.

    The process ends when the launcher has ended. Raises SystemExit where there is no launcher any more.
    """
    _join()
    try:
        yield
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str) and complain(code):
            code = 1
        _leave(code)
        raise SystemExit(code) from end
    _leave(0)


def complain(line: str, code: int = 1) -> bool:
    """Have the launcher say what was wrong, if it is the first to be; False where there is none to say it."""
    return _tell(line=line[:_MOST_TEXT], code=code)


def blame(rank: int) -> None:
    """Say that this worker ends because another one has ended."""
    _tell(lost=rank)


def _join() -> None:
    said = os.environ.pop(ADDRESS, None)  # nothing that this process starts is a worker
    if said is None:
        return
    host, port, token = said.rsplit(":", 2)
    try:
        way = socket.create_connection((host, int(port)), _CONNECT_S)
    except OSError as error:
        raise SystemExit(
            f"llmc: a worker on {socket.gethostname()} found no launcher at {host}:{port} ({error}); "
            "on several hosts start workers by mpirun -n N llmc"
        ) from error
    way.settimeout(None)
    _way.append(way)
    Leave.looked_after = True
    _tell(token=token, rank=rank_said())
    threading.Thread(target=_end_with, args=(way,), name="llmc-launcher", daemon=True).start()


def _leave(code: int | str) -> None:
    """Say that this worker ends, and not by accident."""
    _tell(done=code if isinstance(code, int) else 1)


def _tell(**message: Any) -> bool:
    with contextlib.suppress(OSError):  # the launcher has ended, and so will this
        for way in _way:
            way.sendall(json.dumps(message).encode() + b"\n")
    return bool(_way)


def _end_with(way: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while way.recv(1):
            pass
    os._exit(1)  # another thread may wait inside of a compiled function, or of MPI
