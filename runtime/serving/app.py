"""The application: which address does what, for whom, and what a failure becomes."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from llmc.runtime.loading import schema
from llmc.runtime.model import Model
from llmc.runtime.serving.answers import Answer, embeddings
from llmc.runtime.serving.failures import Refused, body_of, log, refusal
from llmc.runtime.serving.generating import Generating, ids_of
from llmc.runtime.serving.metrics import Metrics
from llmc.runtime.serving.page import page
from llmc.runtime.serving.requests import Asked, chat_request, embedding_request, text_request

_BODY_SECONDS = 60.0  # in which a request's body has to be there
_RETRY_SECONDS = 1  # what a client is told to wait when too many others do
_NO_BUFFERING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # of events, by proxies

Found = TypeVar("Found")
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """What the server grants.

    keys: any of them opens it; none, and it is open. most_tokens: of an answer; where a request does not say, as many.
    most_waiting: queries that may wait beside those that run. most_body: bytes of a request. origins: web pages whose
    scripts may call it.
    """

    most_tokens: int
    keys: tuple[str, ...] = ()
    most_waiting: int = 512
    most_body: int = 8 << 20
    origins: tuple[str, ...] = ()


@dataclass
class App:
    """A model's endpoints. `name`: what it is called in answers; requests may leave it out, and may name no other."""

    model: Model
    name: str
    limits: Limits
    closing: bool = False  # no new requests any more
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.model)

    def asgi(self) -> Starlette:
        """The application that a server runs."""
        endpoints: dict[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", self.chat),
            "/v1/completions": ("POST", self.complete),
            "/v1/embeddings": ("POST", self.embed),
            "/v1/models": ("GET", self.models),
            "/v1/models/{name:path}": ("GET", self.one_model),
            "/metrics": ("GET", self.figures),
        }
        routes = [Route("/health", self.health, methods=["GET"]), Route("/", page, methods=["GET"])]
        routes += [Route(path, self._guarded(path, run), methods=[way]) for path, (way, run) in endpoints.items()]
        origins = list(self.limits.origins)
        pages = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        return Starlette(
            routes=routes, middleware=[pages] if origins else [], exception_handlers={HTTPException: _wrong_address}
        )

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._generate(request, chat_request)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        return await self._generate(request, text_request)

    async def embed(self, request: Request) -> Response:
        """Vectors of texts."""
        self._check_room()
        name, texts, as_base64 = embedding_request(await self._body(request))
        self._check_name(name)
        tokens = await asyncio.to_thread(self._tokens_of, texts)
        vectors = await _unless_gone(request, asyncio.to_thread(self.model.embed, texts))
        self.metrics.count({"prompt_tokens": tokens, "completion_tokens": 0})
        return JSONResponse(embeddings(self.name, vectors, tokens, as_base64))

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        """The model, by its name."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._described())

    async def health(self, request: Request) -> Response:
        """Whether it takes requests. Open to all."""
        return JSONResponse({"status": "closing" if self.closing else "ok"}, 503 if self.closing else 200)

    async def figures(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _generate(self, request: Request, read: Callable[[dict[str, Any], int], Asked]) -> Response:
        self._check_room()  # before the body is read, which may be large
        asked = read(await self._body(request), self.limits.most_tokens)
        self._check_name(asked.model)
        prompts = await asyncio.to_thread(ids_of, self.model, asked)
        self._check_room()  # there may have come others meanwhile
        start = partial(Generating.start, self.model, asked, prompts, self.metrics, request.state.key)
        generating = await asyncio.to_thread(start) if asked.options.form else start()  # grammars take a while to read
        answer = Answer(self.model, self.name, asked)
        if asked.streamed:
            return StreamingResponse(generating.events(answer), media_type="text/event-stream", headers=_NO_BUFFERING)
        return JSONResponse(answer.whole(await _unless_gone(request, generating.whole())))

    def _guarded(self, route: str, run: Endpoint) -> Endpoint:
        """The endpoint for those who have a key; what it raises becomes an answer."""

        async def guarded(request: Request) -> Response:
            try:
                request.state.key = self._key_of(request)
                response = await run(request)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it: the status is for the counter
            except Exception as error:
                refused = refusal(error)
                log(route, error)
                response = JSONResponse(body_of(refused), refused.status, refused.headers)
            self.metrics.requests.labels(route, str(response.status_code)).inc()
            return response

        return guarded

    def _key_of(self, request: Request) -> str:
        """The key that a request has, "" where none is wanted. Raises Refused for one that is not known."""
        if not self.limits.keys:
            return ""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        key = given.strip().encode()
        # Every key is compared, each in a time that does not depend on where they differ.
        found = sum([hmac.compare_digest(key, own.encode()) for own in self.limits.keys])
        if scheme.lower() != "bearer" or not found:
            message = "a key is wanted: Authorization: Bearer KEY" if not given else "this key is not known here"
            raise Refused(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return key.decode()

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise Refused(404, f"model: {schema.quoted(name)} is not here; this server has {self.name!r}",
                          "model_not_found", "model")  # fmt: skip

    def _check_room(self) -> None:
        if self.closing:
            raise Refused(503, "the server is closing", "closing")
        if self.model.engine.stats.waiting > self.limits.most_waiting:
            raise Refused(503, "too many requests wait already; try again", "overloaded",
                          headers={"Retry-After": str(_RETRY_SECONDS)})  # fmt: skip

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object in a request's body."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, "Content-Type: wanted application/json")  # a form of some web page, maybe
        try:
            body = schema.parse_json(await asyncio.wait_for(self._bytes(request), _BODY_SECONDS))
        except asyncio.TimeoutError:
            raise Refused(408, f"the body was not there after {_BODY_SECONDS:.0f} s") from None
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body is no JSON object")
        return body

    async def _bytes(self, request: Request) -> bytes:
        found = bytearray()
        async for piece in request.stream():
            found += piece
            if len(found) > self.limits.most_body:
                raise Refused(413, f"the body has more than {self.limits.most_body} bytes",
                              headers={"Connection": "close"})  # fmt: skip
        return bytes(found)

    def _tokens_of(self, texts: list[Any]) -> int:
        """How many tokens texts have together; raises Refused for token ids, which encoders do not take here."""
        if not all(isinstance(text, str) for text in texts):
            raise Refused(400, "input: token ids are not served; send the text", param="input")
        return sum(len(self.model.encode(text)) for text in texts)

    def _described(self) -> dict[str, Any]:
        context = self.model.manifest["context"]
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "llmc", "context_length": context}


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """What `work` gives; it is cancelled, and ClientDisconnect raised, when the client goes before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _wrong_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "no such address; POST /v1/chat/completions is one", 405: "not by this method"}
    refused = Refused(error.status_code, f"{request.url.path[:100]}: {said.get(error.status_code, error.detail)}")
    return JSONResponse(body_of(refused), error.status_code, error.headers)
