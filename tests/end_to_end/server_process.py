"""A server as a user starts one, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

KEY = "sesame"


@dataclass
class Server:
    """A running server: where it is, and the process."""

    address: str
    process: subprocess.Popen[str]

    def ask(self, path: str, body: Any = None, key: str | None = KEY, **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and JSON of a request; `body` as JSON, or as bytes as they are."""
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if sent is not None:
            named.setdefault("Content-Type", "application/json")
        if key is not None:
            named["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.address + path, sent, named)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.headers, json.loads(reply.read())
        except HTTPError as error:
            return error.code, error.headers, json.loads(error.read())

    def figure(self, name: str) -> float:
        """A figure of /metrics."""
        request = urllib.request.Request(f"{self.address}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read().decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in\n{text}"
        return float(found[1])

    def settles(self, name: str, wanted: float, seconds: float = 20) -> bool:
        """Whether a figure gets there in this time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.figure(name) == wanted:
                return True
            time.sleep(0.05)
        return False


@contextmanager
def serving(artifact: Path, *options: str, key: str | None = KEY) -> Iterator[Server]:
    """`llmc serve` of an artifact at a free port, stopped in the end."""
    environment = {name: value for name, value in os.environ.items() if name != "LLMC_API_KEY"}
    if key is not None:
        environment["LLMC_API_KEY"] = key
    command = [sys.executable, "-m", "llmc", "serve", str(artifact), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("serving"):
                line = process.stderr.readline()
                assert line, f"it ended with {process.wait()}: {lines}"
                lines.append(line)
            yield Server(re.search(r"http://\S+(?=/v1)", lines[-1])[0], process)  # type: ignore[index]
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
