"""Continuous batching beside static batching, and 16 queries at once beside one after another.

    python tests/bench/batching.py

The trace: queries come with exponential gaps, faster than they can be served; lengths of prompts are log-normal, of
answers exponential, as far from equal as those of people are. Greedy, ends ignored, so that every system makes the same
tokens, and that is checked. Static batching takes what has come, up to --rows queries, and takes the next when all of
them have ended; "padded" is what it is elsewhere, where a row that has ended is computed until the last one has;
"leaving" drops such rows, which the step here can do. Continuous batching is the engine: with as many rows as the
static batch has, and with as many as come. Each round runs every system once; shown are medians over the rounds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from engine_case import Clock, Row, arguments, medians, novel_ids, percentile, show, with_artifact

import llmc
from llmc.runtime.decoding.options import Options

PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MOST = 60, 0.8, 512  # tokens
ANSWER_MEAN, ANSWER_MOST = 96, 768
ALONE = 4  # queries that are run one after another for each 16 that are run at once


@dataclass(frozen=True)
class Query:
    """A query of the trace: when it comes, what it says, and how many tokens are wanted."""

    at_s: float
    prompt: list[int]
    tokens: int


@dataclass
class Served:
    """What became of it: when its first token and its last were there, and the tokens."""

    first_s: float
    end_s: float
    ids: list[int]


System = Callable[[Any, list[Query], Clock], list[Served]]


def trace(ids: list[int], count: int, per_s: float, seed: int) -> list[Query]:
    """`count` queries about passages of a text."""
    random = np.random.default_rng(seed)
    at = np.cumsum(random.exponential(1 / per_s, count))
    prompts = np.clip(random.lognormal(np.log(PROMPT_MEDIAN), PROMPT_SIGMA, count), 4, PROMPT_MOST).astype(int)
    answers = np.clip(random.exponential(ANSWER_MEAN, count), 2, ANSWER_MOST).astype(int)
    starts = random.integers(0, len(ids) - PROMPT_MOST, count)
    rows = zip(at, starts, prompts, answers, strict=True)
    return [Query(float(t), ids[s : s + p], int(n)) for t, s, p, n in rows]


def static(rows: int, padded: bool) -> System:
    """Static batching on the runner; `padded`: rows stay until the whole batch has ended."""

    def serve(model: Any, queries: list[Query], clock: Clock) -> list[Served]:
        start, done, waiting = clock.now(), dict[int, Served](), deque(range(len(queries)))
        while waiting:
            clock.wait_until(start + queries[waiting[0]].at_s)
            now = clock.now() - start
            batch = [n for n in list(waiting)[:rows] if queries[n].at_s <= now]
            for number in batch:
                waiting.remove(number)
            _serve_batch(model.runner, queries, batch, padded, lambda: clock.now() - start, done)
        return [done[number] for number in range(len(queries))]

    return serve


def _serve_batch(
    runner: Any, queries: list[Query], batch: list[int], padded: bool, now: Callable[[], float], done: dict[int, Served]
) -> None:
    sequences = {number: runner.new_sequence() for number in batch}
    output = runner.prefill([(sequences[number], queries[number].prompt) for number in batch])
    moment, going = now(), list(batch)
    for number, token in zip(batch, output.argmax, strict=True):
        done[number] = Served(moment, moment, [int(token)])
    while any(len(done[number].ids) < queries[number].tokens for number in going):
        if not padded:
            going = [number for number in going if len(done[number].ids) < queries[number].tokens]
        output = runner.step([(sequences[number], done[number].ids[-1:]) for number in going])
        moment = now()
        for number, token in zip(going, output.argmax, strict=True):
            done[number].ids.append(int(token))
            if len(done[number].ids) == queries[number].tokens:
                done[number].end_s = moment
    for number, sequence in sequences.items():
        runner.release(sequence)
        del done[number].ids[queries[number].tokens :]


def continuous(model: Any, queries: list[Query], clock: Clock) -> list[Served]:
    """The model's engine."""
    engine, start, waiting = model.engine, clock.now(), deque(enumerate(queries))
    numbers, done = dict[int, int](), dict[int, Served]()
    while waiting or engine.query_count:
        now = clock.now() - start
        while waiting and waiting[0][1].at_s <= now:
            number, query = waiting.popleft()
            options = Options(max_tokens=query.tokens, ignore_eos=True)
            numbers[engine.add_query(query.prompt, options)] = number
        if not engine.query_count:
            clock.wait_until(start + waiting[0][1].at_s)
            continue
        results, now = engine.infer(), clock.now() - start
        for result in results:
            served = done.setdefault(numbers[result.id], Served(now, now, []))
            if result.done is not None:
                served.end_s, served.ids = now, result.done.ids
    engine.forget_prefixes()
    return [done[number] for number in range(len(queries))]


def figures(queries: list[Query], served: list[Served]) -> Row:
    """Tokens per second of the whole, and what each query saw of it."""
    seconds = max(each.end_s for each in served)
    waits = [each.first_s - query.at_s for query, each in zip(queries, served, strict=True)]
    a_token = [(each.end_s - query.at_s) / query.tokens for query, each in zip(queries, served, strict=True)]
    return {
        "seconds": seconds,
        "tokens_per_s": sum(len(each.ids) for each in served) / seconds,
        "first_token_s_median": percentile(waits, 0.5),
        "first_token_s_99_percent": percentile(waits, 0.99),
        "s_a_token_median": percentile(a_token, 0.5),
    }


def batching_round(queries: list[Query], systems: dict[str, tuple[System, Any]], clock: Clock) -> dict[str, Row]:
    """A row for each system and its model; all of them must have made the same tokens."""
    rows, first = {}, None
    for name, (serve, model) in systems.items():
        served = serve(model, queries, clock)
        first = first or served
        assert [each.ids for each in served] == [each.ids for each in first], f"{name} made other tokens"
        rows[name] = figures(queries, served)
    fastest = min(row["seconds"] for name, row in rows.items() if name.startswith("static"))
    padded = rows["static, padded"]["seconds"]
    return {
        name: {**row, "to_padded": padded / row["seconds"], "to_leaving": fastest / row["seconds"]}
        for name, row in rows.items()
    }


def concurrency_round(model: Any, ids: list[int], rows: int, tokens: int, clock: Clock) -> dict[str, Row]:
    """Tokens per second, prompts included, of queries one after another and of `rows` at once."""
    queries = [Query(0.0, ids[50 * n : 50 * n + 64], tokens) for n in range(rows)]
    alone = [continuous(model, [query], clock)[0] for query in queries[:ALONE]]
    rate = ALONE * tokens / sum(each.end_s for each in alone)
    together = continuous(model, queries, clock)
    assert [each.ids for each in together[:ALONE]] == [each.ids for each in alone]
    rate_together = rows * tokens / max(each.end_s for each in together)
    return {
        "1 at a time": {"tokens_per_s": rate, "ratio": 1.0},
        f"{rows} at once": {"tokens_per_s": rate_together, "ratio": rate_together / rate},
    }


def main() -> None:
    """Run the rounds, print both tables."""
    parser = arguments(__doc__, threads=1, rounds=3, queries=64, rows=16, per_s=20, tokens=128, seed=0)
    options = parser.parse_args()

    def measure(artifact: Path) -> tuple[list[Row], list[Row]]:
        with (
            llmc.load(artifact, threads=options.threads, most_running=options.rows, drafts=0) as narrow,
            llmc.load(artifact, threads=options.threads, drafts=0) as wide,
        ):
            systems = {
                "static, padded": (static(options.rows, True), wide),
                "static, leaving": (static(options.rows, False), wide),
                f"continuous, {options.rows} rows": (continuous, narrow),
                "continuous, all rows": (continuous, wide),
            }
            ids = novel_ids(wide, 20_000)
            queries = trace(ids, options.queries, options.per_s, options.seed)
            crowds, batches, clock = [], [], Clock(options.threads)
            for _ in range(options.rounds):
                crowds.append(concurrency_round(wide, ids, options.rows, options.tokens, clock))
                batches.append(batching_round(queries, systems, clock))
            return medians(batches), medians(crowds)

    batches, crowds = with_artifact(options.artifact, measure)
    show(
        f"{options.queries} queries, {options.threads} threads, medians of {options.rounds} rounds",
        batches,
        options.json,
    )
    show(f"prompts of 64 tokens, answers of {options.tokens}", crowds, options.json)


if __name__ == "__main__":
    main()
