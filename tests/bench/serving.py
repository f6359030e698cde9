"""What HTTP costs: `llmc serve` asked by several clients at once, beside the engine asked for the same directly.

    python tests/bench/serving.py --clients 1,4,16
    python tests/bench/serving.py --artifact model.llmc --new-tokens 128 --json

    python -m llama_cpp.server --model model.gguf --n_threads 2 --port 8001 &
    python tests/bench/serving.py --peer 127.0.0.1:8001

Each client sends one request after another, streamed, of a prompt that nobody has read. Clients are in this process,
the server in its own, so on few cores they take time from it. By turns with the server, the engine gets as many queries
at once by `generate_batch`, and a peer that runs already the same requests. First: seconds until the first text.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from engine_case import Row, arguments, show, with_artifact

import llmc

WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"]
NO_END = {"0": -100, "2": -100}  # of SmolLM2's tokens, those that end an answer


@contextmanager
def server(artifact: Path, threads: int) -> Iterator[tuple[str, int]]:
    """Host and port of a server in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "llmc",
        "serve",
        str(artifact),
        "--port",
        "0",
        "--threads",
        str(threads),
        "--drafts",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://\S+(?=/v1)", process.stderr.readline())
            assert found, "the server did not start"
            where = urlsplit(found[0])
            assert where.hostname is not None
            assert where.port is not None
            yield where.hostname, where.port
        finally:
            process.terminate()


async def ask(where: tuple[str, int], prompt: str, new_tokens: int) -> tuple[float, int]:
    """Seconds to the first text of one request, and its tokens: as counted by the server, or else its events."""
    body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True,
            "logit_bias": NO_END, "stream_options": {"include_usage": True}}  # fmt: skip
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where[0]}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(*where)
    start, first, events, made = time.perf_counter(), None, 0, None
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    async for line in reader:
        if line.startswith(b"data: {"):
            first, events = first or time.perf_counter(), events + 1
            usage = re.search(rb'"completion_tokens": ?(\d+)', line)
            made = int(usage[1]) if usage else made
    writer.close()
    assert first is not None, "no event came"
    return first - start, events if made is None else made


async def crowd(where: tuple[str, int], prompts: list[str], clients: int, new_tokens: int) -> Row:
    """What so many clients see who share the prompts."""
    left = iter(prompts)
    found: list[tuple[float, int]] = []

    async def client() -> None:
        for prompt in left:
            found.append(await ask(where, prompt, new_tokens))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - start
    first = sorted(each[0] for each in found)
    return {
        "tokens_per_s": sum(each[1] for each in found) / seconds, "first_s": statistics.median(first),
        "first_95_s": first[int(0.95 * (len(first) - 1))],
    }  # fmt: skip


def alone(model: Any, prompts: list[str], clients: int, new_tokens: int) -> float:
    """Tokens per second of the engine, so many queries at once."""
    start = time.perf_counter()
    for at in range(0, len(prompts), clients):
        model.generate_batch(prompts[at : at + clients], max_tokens=new_tokens, ignore_eos=True)
    return len(prompts) * new_tokens / (time.perf_counter() - start)


def measure(artifact: Path, clients: list[int], options: Any) -> list[Row]:
    """A row for each number of clients and system."""
    random = np.random.default_rng(0)
    peer = options.peer.rpartition(":") if options.peer else None
    rows = []
    with server(artifact, options.threads) as own, llmc.load(artifact, threads=options.threads, drafts=0) as model:
        servers = {"llmc": own, **({"peer": (peer[0], int(peer[2]))} if peer else {})}
        for count in clients:
            served: dict[str, list[Row]] = {name: [] for name in servers}
            direct = []
            for _ in range(options.rounds):
                for name, where in servers.items():
                    asked = prompts(random, 4 * count, options.prompt_tokens)
                    served[name].append(asyncio.run(crowd(where, asked, count, options.new_tokens)))
                asked = prompts(random, 4 * count, options.prompt_tokens)
                direct.append(alone(model, asked, count, options.new_tokens))
            for name, found in served.items():
                row = {figure: statistics.median(each[figure] for each in found) for figure in found[0]}
                share = row["tokens_per_s"] / statistics.median(direct)
                rows.append({"server": name, "clients": count, **row, "of_engine": share})
    return rows


def prompts(random: np.random.Generator, count: int, words: int) -> list[str]:
    """Texts of so many words, a token or so each."""
    return [" ".join(random.choice(WORDS, words)) for _ in range(count)]


def main() -> None:
    """Start a server, ask, print."""
    parser = arguments(__doc__, threads=2, prompt_tokens=64, new_tokens=64, rounds=3)
    parser.add_argument("--clients", default="1,4,16", help="at once; default 1,4,16")
    parser.add_argument("--peer", metavar="HOST:PORT", help="another server of OpenAI's interface, which runs already")
    options = parser.parse_args()
    clients = [int(count) for count in options.clients.split(",")]
    show("llmc serve", with_artifact(options.artifact, lambda path: measure(path, clients, options)), options.json)


if __name__ == "__main__":
    main()
