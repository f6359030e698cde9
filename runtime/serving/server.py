"""Listens on an address and runs the application until it is told to stop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import uvicorn

from llmc.runtime.errors import RequestError
from llmc.runtime.serving.app import App

_CLOSING_SECONDS = 10  # that open requests have when the server is told to stop
_IDLE_SECONDS = 30  # that a connection is kept without a request
_MOST_CONNECTIONS = 900  # a process may usually have 1,024 files open


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises RequestError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
        except BaseException:
            found.close()
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RequestError(f"{host}:{port}: cannot listen there: {reason}; choose another --host or --port") from error
    return found


def address_of(listening: socket.socket) -> str:
    """Where a client finds it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: App, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Answer requests until SIGINT or SIGTERM; then those that are open have some seconds to end.

    `ready` is called once requests are taken.
    """
    config = uvicorn.Config(
        app.asgi(), log_config=None, access_log=False, lifespan="off", ws="none", http="h11", server_header=False,
        limit_concurrency=_MOST_CONNECTIONS, timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )  # fmt: skip
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every line that is no HTTP
    _Server(config, app, ready).run(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: App, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._ready = app, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.closing = True
        await super().shutdown(sockets)
