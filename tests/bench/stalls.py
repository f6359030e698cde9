"""How long running queries wait for their next token while a prompt of 8,000 tokens is read.

    python tests/bench/stalls.py

Eight queries are answered; then the long prompt comes. Measured is the time between two tokens of each of the eight,
from when the prompt came until its first token was there, for several numbers of rows in a step: "whole" reads the
prompt in one step, as engines without chunked prefill do; with --layer-groups N, "layered" reads it by groups of
layers. Each round measures every case once; shown are medians.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from engine_case import Clock, Row, arguments, medians, percentile, show, with_artifact

import llmc
from llmc.bench_case import fixed_prompt
from llmc.runtime.decoding.options import Options

RUNNING, BEFORE = 8, 60  # queries that are being answered, and steps that are timed without the long prompt


def stall(artifact: Path, threads: int, prompt_tokens: int, chunk: int, prefill: str) -> Row:
    """Times between tokens, in milliseconds, without the long prompt and while it is read in steps of `chunk` rows."""
    with llmc.load(artifact, threads=threads, prefill_chunk=chunk, prefill=prefill, drafts=0) as model:
        engine, clock = model.engine, Clock(threads)
        vocab = model.manifest["vocab"]
        endless = Options(max_tokens=4000, ignore_eos=True)
        running = {engine.add_query(fixed_prompt(n, 200, vocab), endless): list[float]() for n in range(RUNNING)}
        while any(len(times) < BEFORE for times in running.values()):
            _note(engine, running, clock)
        quiet = _gaps(running)
        start = clock.now()
        long = engine.add_query(fixed_prompt(99, prompt_tokens, vocab), Options(max_tokens=2, ignore_eos=True))
        for times in running.values():
            del times[:-1]  # the wait for the step that follows counts too
        while long not in _note(engine, running, clock):
            pass
        seconds, busy = clock.now() - start, _gaps(running)
        for query in [*running, long]:
            engine.cancel(query)
        return {
            "quiet_median_ms": percentile(quiet, 0.5),
            "median_ms": percentile(busy, 0.5),
            "p99_ms": percentile(busy, 0.99),
            "most_ms": max(busy),
            "p99_to_median": percentile(busy, 0.99) / percentile(busy, 0.5),
            "p99_to_quiet": percentile(busy, 0.99) / percentile(quiet, 0.5),
            "prompt_read_s": seconds,
        }


def _note(engine: Any, running: dict[int, list[float]], clock: Clock) -> set[int]:
    """Run a step and note the time for those who got a token; who got one."""
    results, now = engine.infer(), clock.now()
    for result in results:
        if result.id in running:
            running[result.id].append(now)
    return {result.id for result in results}


def _gaps(running: dict[int, list[float]]) -> list[float]:
    return [1000 * float(gap) for times in running.values() for gap in np.diff(times)]


def main() -> None:
    """Run the rounds, print the table."""
    parser = arguments(__doc__, threads=1, rounds=3, prompt_tokens=8000)
    parser.add_argument("--chunks", default="64,128,256,512", help="rows of a step, beside the whole prompt at once")
    parser.add_argument("--layer-groups", type=int, help="measure layered prefill too; --artifact has to have groups")
    options = parser.parse_args()
    cases: dict[str, tuple[int, str]] = {}
    for chunk in options.chunks.split(","):
        cases[f"{chunk} rows"] = int(chunk), "chunked"
        if options.layer_groups:
            cases[f"{chunk} rows, layered"] = int(chunk), "layered"
    cases["whole"] = 2**17, "chunked"  # rows far into a text count for more than one

    def measure(artifact: Path) -> list[Row]:
        rounds = [
            {name: stall(artifact, options.threads, options.prompt_tokens, *case) for name, case in cases.items()}
            for _ in range(options.rounds)
        ]
        return medians(rounds)

    rows = with_artifact(options.artifact, measure, options.layer_groups)
    title = f"time between tokens of {RUNNING} queries while {options.prompt_tokens} tokens are read"
    show(f"{title}, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
