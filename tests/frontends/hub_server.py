"""A hub on this machine: the three answers that a download asks for, and a line that breaks off."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`repositories`: "org/name" -> folder. `broken`: file -> bytes after which its next answer ends, once."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, str]] = field(default_factory=list)  # of requests that go on with a file
    fetched: list[str] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """Answers for the `hub` of a subclass."""

    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            return self.list_files(path.removeprefix("/api/models/"))
        repository, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        folder = self.hub.repositories.get(repository)
        if folder is None or revision not in ("main", "v1", COMMIT) or not (folder / name).is_file():
            return self.refuse(404, "EntryNotFound" if folder else "RepoNotFound")
        return self.send_file(name, (folder / name).read_bytes(), body)

    def send_file(self, name: str, data: bytes, body: bool) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.hub.ranges.append((name, asked))
        self.end_headers()
        if not body:
            return
        self.hub.fetched.append(name)
        end = self.hub.broken.pop(name, len(data))
        self.wfile.write(data[start:end])
        self.close_connection = end < len(data)

    def list_files(self, rest: str) -> None:
        repository, _, revision = rest.partition("/revision/")
        if repository in self.hub.gated:
            return self.refuse(403, "GatedRepo")
        if repository not in self.hub.repositories:
            return self.refuse(401, "RepoNotFound")
        if revision not in ("", "main", "v1", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        folder = self.hub.repositories[repository]
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        siblings = [{"rfilename": str(f.relative_to(folder)), "size": f.stat().st_size} for f in files]
        return self.send_json({"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings})

    def send_json(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
