"""The web example with real clients: answered at once, and told what is wrong with a request."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llmc

_TIMEOUT_S = 120


@pytest.fixture
def server(smollm2_artifact: Callable[..., Path], root: Path) -> Iterator[int]:
    """The port of examples/web_handler.py while it serves the demo model."""
    command = [sys.executable, str(root / "examples" / "web_handler.py"), str(smollm2_artifact()), "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield int(process.stdout.readline().rpartition(":")[2])
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def post(port: int, body: bytes, path: str = "/chat") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    connection.request("POST", path, body)
    return connection.getresponse()


def chat(question: str, **options: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": question}], **options}).encode()


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events as they come."""
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
    kind = ""
    for line in response:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


def queries(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    connection.request("GET", "/health")
    return int(json.loads(connection.getresponse().read())["queries"])


_QUESTIONS = [f"Name {n} colours." for n in range(2, 7)]


@pytest.mark.model
def test_clients_are_answered_at_once(server: int, smollm2_artifact: Callable[..., Path]) -> None:
    told: dict[str, list[tuple[float, str, dict[str, Any]]]] = {question: [] for question in _QUESTIONS}

    def ask(question: str) -> None:
        for kind, data in events(post(server, chat(question, max_tokens=24))):
            told[question].append((time.monotonic(), kind, data))

    threads = [threading.Thread(target=ask, args=(question,)) for question in _QUESTIONS]
    left = post(server, chat("Tell me a long story.", max_tokens=2000))
    next(events(left))
    for thread in threads:
        thread.start()
    left.close()  # a client that hangs up in the middle
    for thread in threads:
        thread.join()
    with llmc.load(smollm2_artifact()) as model:
        for question, heard in told.items():
            wanted = model.chat([{"role": "user", "content": question}], max_tokens=24)
            assert "".join(data["text"] for _, kind, data in heard if kind == "text") == wanted.text
            assert heard[-1][1:] == ("done", {"finish_reason": wanted.finish_reason, "tokens": len(wanted.ids)})
            assert len(heard) > 3
    # Each began before the first of them had ended.
    assert max(heard[0][0] for heard in told.values()) < min(heard[-1][0] for heard in told.values())
    deadline = time.monotonic() + 30
    while queries(server):
        assert time.monotonic() < deadline, "the query of the client that left goes on"
        time.sleep(0.05)


@pytest.mark.model
def test_bad_requests_are_told_why(server: int) -> None:
    refused = {
        b"": "JSON",
        b"[": "JSON",
        b"[" * 100_000: "JSON",
        b"[]": "messages",
        b"{}": "messages",
        chat("x", max_tokens=0): "max_tokens",
        chat("x", colour="red"): "colour",
        chat("x " * 20_000): "context",
    }
    for body, says in refused.items():
        response = post(server, body)
        assert response.status == 400
        assert says in json.loads(response.read())["error"]
    assert post(server, b"", "/elsewhere").status == 404
    assert post(server, b" " * (2 << 20)).status == 413
    assert queries(server) == 0
