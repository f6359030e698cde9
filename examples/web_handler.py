"""Serve a model to several clients at once: each gets its answer as server-sent events while it is made.

python examples/web_handler.py MODEL.llmc [PORT]

curl -N localhost:8000/chat -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}'

A real service would leave HTTP to a framework; what it needs of llmc is `answer` below.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import llmc
import llmc.runtime

MOST_QUERIES = 64  # more are told to come back later
MOST_BYTES = 1 << 20  # of a request
PATIENCE_S = 10  # for a request to arrive


class Refused(Exception):
    """A request that is answered with a status and a reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def answer(model: Any, wish: dict[str, Any]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Events of one answer, as (kind, data). Leaving the loop early ends the query and gives its memory back."""
    options = llmc.runtime.Options.of({key: value for key, value in wish.items() if key != "messages"})
    # In a thread, because a long conversation would hold all the others up.
    prompt = await asyncio.to_thread(model.chat_prompt, wish.get("messages"))
    stream = model.engine.astream(model.add(prompt, options))
    try:
        async for piece in stream:
            yield "text", {"text": piece}
        yield "done", {"finish_reason": stream.result.finish_reason, "tokens": len(stream.result.ids)}
    finally:
        await stream.aclose()


class Handler:
    """Speaks HTTP with one client after another, many at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and hang up."""
        try:
            method, path, body = await asyncio.wait_for(_request(reader), PATIENCE_S)
            if (method, path) == ("GET", "/health"):
                await _reply(writer, HTTPStatus.OK, {"queries": self._model.engine.query_count})
            elif (method, path) == ("POST", "/chat"):
                await self._chat(reader, writer, body)
            else:
                raise Refused(HTTPStatus.NOT_FOUND, "there are POST /chat and GET /health")
        except Refused as refusal:
            await _reply(writer, refusal.status, {"error": str(refusal)})
        except (
            asyncio.TimeoutError,
            ConnectionError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            ValueError,
        ):
            pass  # no HTTP, or nobody there any more
        finally:
            writer.close()

    async def _chat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        if self._model.engine.query_count >= MOST_QUERIES:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many answers are being made; try again")
        try:
            wish = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "wanted JSON") from error
        if not isinstance(wish, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, 'wanted {"messages": [...]}')
        gone = asyncio.ensure_future(_end(reader))
        begun = False
        events = answer(self._model, wish)
        try:
            async for kind, data in events:
                if gone.done():
                    return
                if not begun:
                    writer.write(_head(HTTPStatus.OK, "text/event-stream"))
                    begun = True
                writer.write(f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode())
                await writer.drain()
        except llmc.runtime.LlmcError as error:
            if not begun:
                raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error
            writer.write(f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n".encode())
        finally:
            await events.aclose()
            gone.cancel()


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Method, path and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    fields = dict(line.lower().split(":", 1) for line in head[1:] if ":" in line)
    size = int(fields.get("content-length", 0))
    if not 0 <= size <= MOST_BYTES:
        await _pass_over(reader, min(size, 16 * MOST_BYTES))
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MOST_BYTES} bytes")
    return method, path, await reader.readexactly(size)


async def _pass_over(reader: asyncio.StreamReader, size: int) -> None:
    """Read what nobody wants: a client that sends all of it before it listens would not hear the answer."""
    while size > 0 and (got := await reader.read(min(size, 1 << 16))):
        size -= len(got)


async def _end(reader: asyncio.StreamReader) -> None:
    """Return when the client hangs up."""
    while await reader.read(4096):
        pass


def _head(status: HTTPStatus, kind: str) -> bytes:
    return f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()


async def _reply(writer: asyncio.StreamWriter, status: HTTPStatus, data: dict[str, Any]) -> None:
    writer.write(_head(status, "application/json") + json.dumps(data).encode() + b"\n")
    await writer.drain()


async def main(path: str, port: int) -> None:
    """Serve the artifact at `path` on this machine until a signal comes."""
    with llmc.load(path) as model:
        server = await asyncio.start_server(Handler(model).serve, "127.0.0.1", port)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()
        server.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 8000))
