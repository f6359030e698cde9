"""The cases of compare.py: what each asks of a system's process, and the samples that its answer gives."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_figures import ROWS

from llmc.bench_case import fixed_prompt

HERE = Path(__file__).parent
PROMPT, START = 512, 16  # tokens: of a prefill, and ahead of a decode
ROW_STEPS, BUSY_STEPS = 16, 24
LONGEST_S = 600  # a case that takes longer has failed
# The request says how many threads; and sources without byte code beside them would be compiled at every start.
DROPPED = {"OMP_NUM_THREADS", "TVM_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"}

Samples = dict[str, list[float]]  # by measure


@dataclass(frozen=True)
class System:
    """What is measured: llmc with a format, or a peer with one of its files, on one model."""

    name: str  # such as "llmc q4"
    python: str
    script: str
    model: str
    vocab: int
    options: tuple[str, ...] = ()


class CaseError(Exception):
    """A system did not answer; the text says how it ended."""


@dataclass(frozen=True)
class Settings:
    """How much of everything a case does."""

    threads: int
    repeats: int
    new_tokens: int
    cpu_time: bool


def single(system: System, settings: Settings) -> Samples:
    """Prefill of 512 tokens and decode after 16, one sequence; time to load, and the most memory it held."""
    asks = [_ask(system, 100, 1, PROMPT, 1), _ask(system, 101, 1, START, 4)]
    for number in range(settings.repeats):
        asks.append(_ask(system, number, 1, PROMPT, 1))
        asks.append(_ask(system, number + 50, 1, START, settings.new_tokens))
    answer = run(system, settings, asks)
    times = answer["times"][2:]
    return {
        "prefill": [PROMPT / each[0] for each in times[::2]],
        "decode": [decode_rate(each, 1) for each in times[1::2]],
        "load s": [answer["load_s"]],
        "peak MB": [answer["peak_bytes"] / 1e6],
    }


def batch(rows: int, system: System, settings: Settings) -> Samples:
    """Decode of `rows` sequences at once, each after a prompt of 16 tokens of its own."""
    asks = [_ask(system, 100, rows, START, 3)]
    asks += [_ask(system, number, rows, START, settings.new_tokens) for number in range(settings.repeats)]
    answer = run(system, settings, asks)
    rates = [decode_rate(each, rows) for each in answer["times"][1:]]
    return {f"batch {rows}": rates, f"batch {rows} peak MB": [answer["peak_bytes"] / 1e6]}


def step_times(system: System, settings: Settings) -> Samples:
    """Seconds of a step with 1 to 16 rows, by turns in one process."""
    asks = [_ask(system, 100, rows, START, 3) for rows in ROWS]
    for number, rows in itertools.product(range(settings.repeats), ROWS):
        asks.append(_ask(system, number, rows, START, ROW_STEPS))
    found: Samples = {}
    for ask, times in zip(asks[len(ROWS) :], run(system, settings, asks)["times"][len(ROWS) :], strict=True):
        found.setdefault(f"step {len(ask['prompts'])}", []).append(step_time(times))
    return found


def neighbour(system: System, settings: Settings) -> Samples:
    """Decode rate beside a process that keeps one core busy, over the rate without it, by turns."""
    asks = [_ask(system, 100, 1, START, 4)]
    for number in range(settings.repeats):
        asks += [{**_ask(system, number + busy * 50, 1, START, BUSY_STEPS), "busy": busy} for busy in (0, 1)]
    rates = [decode_rate(each, 1) for each in run(system, settings, asks)["times"][1:]]
    return {"busy": [busy / quiet for quiet, busy in zip(rates[::2], rates[1::2], strict=True)]}


def first_token(system: System, settings: Settings) -> Samples:
    """Seconds from starting the process to its first output: of llmc a text for a text, of peers ids for ids."""
    request = None
    command = [system.python, system.script, *system.options]
    if system.script.endswith("llmc_case.py"):
        command = [
            system.python, "-m", "llmc", "run", system.model, "Hello", "--raw", "--max-tokens", "2", "--ignore-eos",
            "--threads", str(settings.threads), *system.options,
        ]  # fmt: skip
    else:
        request = json.dumps(_request(system, settings, [_ask(system, 0, 1, 2, 1)]))
    found = []
    for _ in range(settings.repeats + 1):  # the first one fills the page cache
        start = time.perf_counter()
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(system),
            start_new_session=True,
        ) as process, _for_so_long(process):  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write((request or "").encode())
            process.stdin.close()
            text = process.stdout.read(1)
            found.append(time.perf_counter() - start)
            process.stdout.read()
        if not text:
            raise CaseError(f"exit code {process.returncode} without output")
    return {"first token s": found[1:]}


@contextlib.contextmanager
def _for_so_long(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End it, and what it has started, if it takes longer: a child of it that hangs keeps its output open."""
    timer = threading.Timer(LONGEST_S, os.killpg, [process.pid, signal.SIGKILL])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class Asked:
    """What is asked of `llmc compile`."""

    quant: str
    activations: str

    def command(self, source: Path, output: Path | str) -> list[str]:
        """The command, but for whether it checks."""
        given = ["--quant", self.quant, "--activations", self.activations]
        return [sys.executable, "-m", "llmc", "compile", str(source), "-o", str(output), *given]


def compile_case(source: Path, output: Path, asked: Asked) -> Samples:
    """Compile, checks left out: seconds, and the most memory its processes held, as a multiple of the source's size."""
    command = [*asked.command(source, output), "--no-check"]
    output.parent.mkdir(parents=True, exist_ok=True)
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, _held_by(process.pid))
            time.sleep(0.05)
        assert process.stderr is not None
        said = process.stderr.read()
    if process.returncode:
        raise CaseError(said.strip()[-300:])
    seconds = time.perf_counter() - start
    return {"compile s": [seconds], "compile MB": [peak / 1e6], "compile / source": [peak / source.stat().st_size]}


def loss_case(source: Path, folder: Path, asked: Asked) -> Samples:
    """What it loses against the unquantized model, by the check that `llmc compile` makes."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        command = [*asked.command(source, Path(made) / "checked.llmc"), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CaseError(done.stderr.strip()[-300:])
    loss = json.loads(done.stdout)["loss"]
    return {"KL": [loss["kl"]], "same choice": [loss["top1_agreement"]]}


def run(system: System, settings: Settings, asks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer of the system's process."""
    request = json.dumps(_request(system, settings, asks))
    command = [system.python, system.script, *system.options]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=LONGEST_S, env=environment(system)
        )
    except subprocess.TimeoutExpired:
        raise CaseError(f"took more than {LONGEST_S} s") from None
    if done.returncode:
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise CaseError(f"{end}: {done.stderr.strip()[-300:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def decode_rate(times: list[float], rows: int) -> float:
    """Tokens per second from the first token to the last.

    >>> decode_rate([1.0, 1.5, 2.0], 4)
    8.0
    """
    return rows * (len(times) - 1) / (times[-1] - times[0])


def step_time(times: list[float]) -> float:
    """The median of the steps after the first, which reads the prompts.

    >>> step_time([5.0, 6.0, 9.0, 10.0])
    1.0
    """
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def environment(system: System) -> dict[str, str]:
    """Of the system's process: no number of threads but the one it is asked for, byte code, and no packages of ours."""
    dropped = DROPPED if system.python == sys.executable else DROPPED | {"PYTHONPATH"}
    return {name: text for name, text in os.environ.items() if name not in dropped}


def _request(system: System, settings: Settings, asks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": system.model, "threads": settings.threads, "cpu_time": settings.cpu_time, "asks": asks}


def _ask(system: System, number: int, rows: int, tokens: int, new: int) -> dict[str, Any]:
    """The same ids for every system; each number has its own, so that nobody has read them before."""
    return {"prompts": [fixed_prompt(1000 * number + row, tokens, system.vocab) for row in range(rows)], "new": new}


def _held_by(process: int) -> int:
    """Bytes that a process and its children hold now; of pages that several share, each has its part."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            number, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            if process in (number, parent):
                lines = (stat.parent / "smaps_rollup").read_text().splitlines()
                total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return total
