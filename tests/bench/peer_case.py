"""What a system that is measured is asked, and how it answers: JSON on standard input, JSON on standard output.

Each system is a process of its own, with an interpreter of its own, so that this file needs the standard library only.
The request: {"model": path, "threads": n, "cpu_time": false, "asks": [{"prompts": [[ids], ...], "new": n, "busy": 0}]}.
An ask is a batch of prompts of one length, read together and answered greedily with `new` tokens each, whatever they
are. Asks come in order, on one loaded model; "busy": n, beside n processes that do nothing but turn, each on a core.
The answer: {"load_s": s, "peak_bytes": n, "times": [[s, ...], ...]}: for each ask, when each step's tokens were there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Prompts = list[list[int]]
# Answers prompts with so many tokens each: seconds since it began, by the clock given, at the end of every step.
Answer = Callable[[Prompts, int, Callable[[], float]], list[float]]
# (model, threads, most sequences, most tokens of a sequence) -> Answer
Open = Callable[[str, int, int, int], Answer]

BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


def serve(open_model: Open) -> None:
    """Read the request, answer it."""
    request = json.loads(sys.stdin.read())
    asks = request["asks"]
    clock = time.process_time if request["cpu_time"] else time.perf_counter
    rows = max(len(ask["prompts"]) for ask in asks)
    tokens = max(len(ask["prompts"][0]) + ask["new"] for ask in asks)
    start = time.perf_counter()
    answer = open_model(request["model"], request["threads"], rows, tokens)
    load_s = time.perf_counter() - start
    times = []
    for ask in asks:
        with busy_neighbours(ask.get("busy", 0)):
            times.append(answer(ask["prompts"], ask["new"], clock))
    print(json.dumps({"load_s": load_s, "peak_bytes": peak_bytes(), "times": times}), flush=True)
    os._exit(0)  # some systems crash when they are taken down, and all of them take time


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """`count` processes that take the last cores this one may use, while the block runs."""
    cores = sorted(os.sched_getaffinity(0))[-count:] if count else []
    started = [
        subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        for core in cores
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it turns
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def steps_of(clock: Callable[[], float], step: Callable[[], object], new: int) -> list[float]:
    """Run `step` `new` times, the first of which reads the prompts; when each of them ended."""
    start, times = clock(), []
    for _ in range(new):
        step()
        times.append(clock() - start)
    return times


def peak_bytes() -> int:
    """The most memory this process held, mapped files included: VmHWM, since `ru_maxrss` is inherited."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
