"""Ten thousand short queries through one engine, from several threads, with cancels and failures on purpose.

    python tests/bench/soak.py

Threads ask, read to the end, stop reading, or cancel; pages cannot be had now and then, and some steps fail. The cache
is too small for all, so that queries are preempted too. In the end no page may be held, memory must not grow in the
second half, and of the queries that ended well every 50th must have the tokens that it has alone.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from engine_case import Row, arguments, show, with_artifact

import llmc
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.freed_memory import give_back
from llmc.runtime.errors import LlmcError

WORKERS, CACHE_PAGES = 12, 40
SILENCE_S = 120  # a thread that waits longer hangs
PREFIXES, PREFIX_TOKENS = 3, 24  # beginnings that several queries have
CHECKED = 50  # of the queries that ended well, every so many is asked again alone


@dataclass(frozen=True)
class Case:
    """One query and what its asker does: "read" it, "close" its stream early, or "cancel" it at once."""

    prompt: list[int]
    options: Options
    salt: str
    priority: int
    fate: str


@dataclass
class Soaked:
    """What happened: how queries ended, the tokens of those that were read, and memory after each tenth, in MB."""

    ends: Counter[str] = field(default_factory=Counter)
    answers: dict[int, list[int]] = field(default_factory=dict)
    memory_mb: list[float] = field(default_factory=list)
    troubles: int = 0
    seconds: float = 0.0


def case(number: int, vocab: int, seed: int) -> Case:
    """Query `number` of a soak: always the same."""
    random = np.random.default_rng([seed, number])
    prefix = np.random.default_rng([seed, 10**9 + int(random.integers(PREFIXES))]).integers(0, vocab, PREFIX_TOKENS)
    own = random.integers(0, vocab, random.integers(1, 12))
    prompt = [*prefix.tolist(), *own.tolist()] if random.random() < 0.5 else own.tolist()
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": number, "n": int(random.integers(1, 4))}
    tokens = int(random.integers(1, 8 if random.random() < 0.8 else 32))
    options = Options(max_tokens=tokens, ignore_eos=True, **(sampled if random.random() < 0.5 else {}))
    fate = str(random.choice(["read", "close", "cancel"], p=[0.7, 0.15, 0.15]))
    return Case(prompt, options, str(random.choice(["", "other"])), int(random.integers(3)), fate)


@contextmanager
def trouble(runner: Any, share: float, seed: int, soaked: Soaked) -> Any:
    """Make one page in so many, and one step in so many, fail; the runner is as before afterwards."""
    random, lock = np.random.default_rng(seed), threading.Lock()

    def fails() -> bool:
        with lock:
            wrong = random.random() < share
            soaked.troubles += wrong
        return wrong

    def flaky(function: Any, error: type[Exception], why: str) -> Any:
        def call(*arguments: Any) -> Any:
            if fails():
                raise error(why)  # a new one: an exception keeps the frames of every time it was raised
            return function(*arguments)

        return call

    ledgers, step = runner.pool.ledgers, runner.step_function
    for ledger in ledgers:
        ledger.take = flaky(ledger.take, MemoryError, "no page on purpose")
    runner.step_function = flaky(step, RuntimeError, "a step that fails on purpose")
    try:
        yield
    finally:
        runner.step_function = step
        for ledger in ledgers:
            del ledger.take


def ask(engine: Any, each: Case) -> tuple[str, list[int] | None]:
    """How the query ended, and its tokens if it was read to the end."""
    query = engine.add_query(each.prompt, each.options, salt=each.salt, priority=each.priority)
    if each.fate == "cancel":
        engine.cancel(query)
        return "cancelled", None
    if each.fate == "close":
        stream = engine.stream(query)
        next(stream, None)
        stream.close()
        return "closed", None
    last = None
    for result in engine.follow([query]):
        last = result
    assert last is not None, "a query that was followed had no result"
    if last.error is not None or last.done is None:
        return "failed", None
    return last.done.finish_reason, last.done.ids


class Askers:
    """Threads that ask queries 0, 1, 2... of an engine, each of them one after another."""

    def __init__(self, engine: Any, vocab: int, queries: int, seed: int, soaked: Soaked) -> None:
        self.engine, self.vocab, self.queries, self.seed, self.soaked = engine, vocab, queries, seed, soaked
        self._numbers = iter(range(queries))
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def run(self, workers: int) -> None:
        """Ask all of them. Raises what a thread raised, and TimeoutError where none gets on."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                before = self.soaked.ends.total()
                thread.join(SILENCE_S)
                if thread.is_alive() and self.soaked.ends.total() == before:
                    faulthandler.dump_traceback()
                    raise TimeoutError(f"no query ended for {SILENCE_S} s; {self.engine.stats}")
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        while (number := self._next()) is not None:
            try:
                end, ids = ask(self.engine, case(number, self.vocab, self.seed))
            except LlmcError:
                end, ids = "failed", None
            except BaseException as error:
                self._errors.append(error)
                return
            with self._lock:
                self.soaked.ends[end] += 1
                if ids is not None:
                    self.soaked.answers[number] = ids

    def _next(self) -> int | None:
        with self._lock:
            number = None if self._errors else next(self._numbers, None)
            if number is not None and number % max(1, self.queries // 10) == 0:
                self.soaked.memory_mb.append(own_bytes() / 1e6)
            return number


def soak(engine: Any, runner: Any, vocab: int, queries: int, seed: int, share: float, workers: int = WORKERS) -> Soaked:
    """Ask `queries` queries from several threads; failures come with probability `share` a page and a step."""
    soaked, start = Soaked(), time.perf_counter()
    with trouble(runner, share, seed, soaked):
        Askers(engine, vocab, queries, seed, soaked).run(workers)
    soaked.memory_mb.append(own_bytes() / 1e6)
    soaked.seconds = time.perf_counter() - start
    return soaked


def check(engine: Any, runner: Any, vocab: int, seed: int, soaked: Soaked, every: int = CHECKED) -> int:
    """Raise AssertionError for a page that is held, or tokens that differ from those alone; how many were compared."""
    while engine.query_count:
        engine.infer()  # queries that were cancelled leave with the next step
    engine.forget_prefixes()
    runner.pool.check([])
    assert runner.pool.free_pages == runner.pool.num_pages
    numbers = sorted(soaked.answers)[::every]
    for number in numbers:
        end, ids = ask(engine, case(number, vocab, seed))
        engine.forget_prefixes()
        assert ids == soaked.answers[number], f"query {number} ({end}) says something else alone"
    runner.pool.check([])
    return len(numbers)


def own_bytes() -> int:
    """Memory of this process that is no file's: weights come in from their file as tokens touch them.

    What the allocator only keeps is given back first, as the engine does now and then.
    """
    give_back()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """Soak, check, print what happened."""
    parser = arguments(__doc__, threads=1, queries=10_000, seed=0, per_mille=5)
    parser.add_argument("--preemption", default="recompute", help="or swap")
    options = parser.parse_args()

    def measure(artifact: Path) -> list[Row]:
        wishes: dict[str, Any] = {
            "policy": "priority",
            "preemption": options.preemption,
            "cache_tokens": 16 * CACHE_PAGES,
        }
        with llmc.load(artifact, threads=options.threads, **wishes) as model:
            engine, vocab = model.engine, model.manifest["vocab"]
            soaked = soak(engine, model.runner, vocab, options.queries, options.seed, options.per_mille / 1000)
            compared = check(engine, model.runner, vocab, options.seed, soaked)
            memory, stats = soaked.memory_mb, engine.stats
            half = -(-len(memory) // 2)
            return [
                {
                    **{name: soaked.ends[name] for name in ("length", "closed", "cancelled", "failed")},
                    "troubles": soaked.troubles, "preempted": stats.preempted, "steps": stats.steps,
                    "compared_alone": compared, "seconds": soaked.seconds, "MB_first_half": max(memory[:half]),
                    "MB_second_half": max(memory[half:]), "MB_tenths": " ".join(f"{each:.0f}" for each in memory),
                }
            ]  # fmt: skip

    rows = with_artifact(options.artifact, measure)
    show(
        f"{options.queries} queries, {WORKERS} threads, {CACHE_PAGES} pages; no page is held in the end",
        rows,
        options.json,
    )
    enough = options.queries >= 1000  # before, buffers of all sizes have not been needed
    assert not enough or rows[0]["MB_second_half"] < 1.1 * rows[0]["MB_first_half"], "memory grew"


if __name__ == "__main__":
    main()
