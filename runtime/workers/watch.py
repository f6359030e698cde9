"""How workers learn that one of them has ended: each holds a connection to the front, which the system closes then."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
from typing import Any

from llmc.runtime.errors import WorkerLost

_JOIN_S = 30.0  # for all workers to connect
_TOKEN_BYTES = 16


class Watch:
    """Of the front: notes which worker ended first. Of any other: ends its process when the front's has ended.

    Made by all workers at once; `world` is the communicator of all.
    """

    def __init__(self, world: Any, names: list[str]) -> None:
        self._names, self._lost, self._ending, self._closed = names, -1, False, False
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
            raise WorkerLost(
                f"worker {self._lost} (device {self._names[self._lost]}) ended: it was killed, or failed as it says on "
                "standard error; start all of them again"
            )

    def expect_end(self) -> None:
        """The others are about to end: this process goes on then."""
        self._ending = True

    def close(self) -> None:
        """Stop watching. When the front does, the others end."""
        self._closed = True
        for way in self._ways.values():
            with way:  # a shutdown wakes the thread, which a close alone does not
                _shut(way)

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
            (key, _), *_ = ways.select()  # nothing is ever said: it is the end of one
        if self._closed:
            return
        self._lost = key.data
        if 0 in self._ways and not self._ending:
            os._exit(1)  # a thread of this process may wait inside of a compiled function


def _shut(way: socket.socket) -> None:
    try:
        way.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other end was quicker
