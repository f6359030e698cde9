"""How workers learn that one of them has ended: each holds a connection to the front, which the system closes then."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from typing import Any

from llmc.runtime.errors import WorkerLost
from llmc.runtime.workers.member import blame

_JOIN_S = 30.0  # for all workers to connect
_TOKEN_BYTES = 16
_LAST_WORDS_S = 0.4  # for a front that ends its workers to say why
_GOODBYE = b"."  # who is done says so; the end of a connection alone is a death


class Watch:
    """Of the front: notes which worker ended first. Of any other: ends its process when the front's has ended.

    Made by all workers at once; `world` is the communicator of all.
    """

    def __init__(self, world: Any, names: list[str]) -> None:
        self._names, self._lost, self._closed = names, -1, False
        self._ways: dict[int, socket.socket] = {}
        hosts = set(world.allgather(socket.gethostname()))
        if world.rank == 0:
            host = "127.0.0.1" if len(hosts) == 1 else socket.gethostname()
            with socket.create_server((host, 0)) as door:
                token = secrets.token_bytes(_TOKEN_BYTES)
                world.bcast((door.getsockname(), token))
                self._accept(door, token, world.size - 1)
        else:
            address, token = world.bcast(None)
            self._ways[0] = socket.create_connection(address, _JOIN_S)
            self._ways[0].settimeout(None)
            self._ways[0].sendall(token + world.rank.to_bytes(4, "big"))
        world.Barrier()
        threading.Thread(target=self._watch, name="llmc-watch", daemon=True).start()

    def check(self) -> None:
        """Raise WorkerLost, naming it, when a worker has ended."""
        if self._lost >= 0:
            how = "it was killed, or failed as it says on standard error" if self._lost else "a step failed there"
            raise WorkerLost(
                f"worker {self._lost} (device {self._names[self._lost]}) ended: {how}; start all of them again"
            )

    def give_up(self) -> None:
        """Of the front: end all others."""
        self._lost = 0
        self.close()

    def close(self) -> None:
        """Stop watching, and being watched; where somebody was lost, the others end."""
        self._closed = True
        for way in self._ways.values():
            with way, contextlib.suppress(OSError):  # the other end was quicker
                if self._lost < 0:
                    way.sendall(_GOODBYE)
                way.shutdown(socket.SHUT_RDWR)  # wakes the thread, which a close alone does not

    def _accept(self, door: socket.socket, token: bytes, count: int) -> None:
        door.settimeout(_JOIN_S)
        while len(self._ways) < count:
            way, _ = door.accept()
            way.settimeout(_JOIN_S)
            said = way.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if not secrets.compare_digest(said[:_TOKEN_BYTES], token):
                way.close()  # somebody else
                continue
            self._ways[int.from_bytes(said[_TOKEN_BYTES:], "big")] = way

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ways:
            for rank, way in self._ways.items():
                ways.register(way, selectors.EVENT_READ, rank)
            while ways.get_map():
                for key, _ in ways.select():
                    ways.unregister(key.fileobj)
                    if not _said_goodbye(key.fileobj) and not self._closed:
                        self._note(key.data)

    def _note(self, rank: int) -> None:
        if rank == 0:
            blame(rank)
            time.sleep(_LAST_WORDS_S)  # mpirun ends all as soon as one has failed
            os._exit(1)  # a thread of this process may wait inside of a compiled function
        if self._lost < 0:
            self._lost = rank


def _said_goodbye(way: Any) -> bool:
    try:
        return bool(way.recv(1) == _GOODBYE)
    except OSError:
        return False
