"""Who of the workers has begun, is done, or ended without a word, as their launcher learns it from connections."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmc.runtime.workers.member import ADDRESS
from llmc.runtime.workers.world import rank_in

_MOST_BYTES = 1 << 16  # of a message
_SIGNALLED = 128  # exit codes above: of who was asked to end, by this much and the signal's number
_LOOPBACK = "127.0.0.1"
_SEVERAL_HOSTS = ("HYDRA_HOST_FILE", "SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE")


class Roll:
    """The workers of a run. What went wrong first counts: what follows is most often of its making.

    error: what to say, None as long as nothing is wrong. code: the exit code that goes with it, then that of rank 0.
    explained: whether it says all that there is to say, so that nobody needs to read what mpirun said.
    """

    def __init__(self, devices: Sequence[str], ready: selectors.BaseSelector) -> None:
        self._devices, self._ready = devices, ready
        self._joined: set[int] = set()
        self._done: dict[int, int] = {}
        self._blamed: int | None = None  # has ended, as another one says
        self._blaming: set[int] = set()  # who said so of another, and ends because of it
        self.error: str | None = None
        self.explained = True
        self.code = 0
        self.token = secrets.token_hex(16)
        host = socket.gethostname() if any(name in os.environ for name in _SEVERAL_HOSTS) else _LOOPBACK
        self._door = socket.create_server((host, 0))
        self._ways: set[socket.socket] = set()
        ready.register(self._door, selectors.EVENT_READ, self._admit)

    @property
    def environment(self) -> dict[str, str]:
        """What a worker finds its launcher by."""
        host, port = self._door.getsockname()
        return {ADDRESS: f"{host}:{port}:{self.token}"}

    @property
    def failed(self) -> bool:
        """Whether this run has come to a bad end."""
        return self.error is not None or self.code != 0 or self._blamed is not None

    @property
    def connected(self) -> bool:
        """Whether there are workers that have not ended yet."""
        return bool(self._ways)

    @property
    def waiting(self) -> set[int]:
        """Ranks that have not begun, while others have."""
        return set(range(len(self._devices))) - self._joined if self._joined else set()

    def finish(self, mpirun: int) -> None:
        """Judge the run by how mpirun has ended, where nothing was wrong before."""
        if self._blamed is not None:
            self._lose(self._blamed)
        if self.failed or (mpirun == 0 and len(self._done) == len(self._devices)):
            return
        self.explained = False
        missing = [rank for rank in range(len(self._devices)) if rank not in self._done]
        when = f"before {self._named(missing)} had begun" if missing else "once all workers were done"
        self._fail(f"mpirun ended with exit code {mpirun} {when}")

    def check_start(self) -> None:
        """Note workers that have ended before they could begin."""
        gone = self.waiting - set(present(self.token))
        if gone:
            self._fail(f"{self._named(sorted(gone))} ended before it could begin")

    def close(self) -> None:
        """Hang up: workers that are still there end."""
        for way in [self._door, *self._ways]:
            way.close()

    def _fail(self, line: str, code: int = 1) -> None:
        if self.error is None and self.code == 0:
            self.error, self.code = line, code

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"worker {rank} (device {self._devices[rank]})" for rank in ranks)

    def _admit(self) -> None:
        way, _ = self._door.accept()
        self._ways.add(way)
        way.setblocking(False)
        self._ready.register(way, selectors.EVENT_READ, partial(self._listen, way, _Lines()))

    def _listen(self, way: socket.socket, lines: _Lines) -> None:
        try:
            data = way.recv(_MOST_BYTES)
        except OSError:
            data = b""
        for message in lines.of(data):
            if lines.rank is None and not self._joins(message, lines):
                data = b""  # somebody else
                break
            if lines.rank is not None:
                self._heed(lines.rank, message)
        if not data:
            self._ready.unregister(way)
            self._ways.discard(way)
            way.close()
            if lines.rank is not None and lines.rank not in self._done and lines.rank not in self._blaming:
                self._lose(lines.rank)

    def _joins(self, message: dict[str, Any], lines: _Lines) -> bool:
        token, rank = message.get("token"), message.get("rank")
        if not isinstance(token, str) or not secrets.compare_digest(token.encode(), self.token.encode()):
            return False
        if not isinstance(rank, int) or not 0 <= rank < len(self._devices):
            self._fail(f"mpirun gave a worker the rank {rank}, wanted one of 0..{len(self._devices) - 1}")
            return False
        lines.rank = rank
        self._joined.add(rank)
        return True

    def _heed(self, rank: int, message: dict[str, Any]) -> None:
        if "line" in message:
            line = message["line"] if rank == 0 else f"{self._named([rank])}: {message['line']}"
            self._fail(line, message["code"])
        elif "done" in message:
            self._done[rank] = code = message["done"]
            if code > _SIGNALLED:
                self._lose(rank, f"signal {code - _SIGNALLED}")
            elif self.error is None:
                self.code = self.code or code
        elif "lost" in message:  # whom mpirun killed because of a third one, perhaps: that one's end is heard of, too
            self._blaming.add(rank)
            self._blamed = message["lost"] if self._blamed is None else self._blamed

    def _lose(self, rank: int, how: str = "it was killed, or crashed") -> None:
        not_begun = sorted(self.waiting - set(present(self.token)))
        too = f"; {self._named(not_begun)} had not begun" if not_begun else ""
        self._fail(f"{self._named([rank])} ended: {how}{too}; start all of them again")


class _Lines:
    """The messages of a connection, a line each; and whose it is."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self._rest = b""

    def of(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are whole with these bytes; what is none reads as an empty one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            return [{}]
        return [_message(line) for line in lines]


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def present(token: str) -> dict[int, int]:
    """Rank -> process, of the workers on this machine that were started with the token, dead ones left out."""
    return {rank: pid for pid, rank in started(token).items() if rank is not None}


def started(token: str) -> dict[int, int | None]:
    """Process -> its rank, of all that have the token in their environment; mpirun's own have no rank."""
    found: dict[int, int | None] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or is another's
        if token.encode() in environment:
            pairs = (pair.partition("=") for pair in environment.decode(errors="replace").split("\0"))
            found[int(folder.name)] = rank_in({name: value for name, _, value in pairs})
    return found
