"""What sharing a prefix saves: 20 queries that begin with the same 1,500 tokens of a novel.

    python tests/bench/prefix.py

All of them come at once, each with a few words of its own behind the prefix, and ask for 16 tokens. Without sharing
each has a salt of its own, which is what keeps the prefixes of different users apart. The answers must be equal.
"Later" asks the same 20 again of an engine that has been asked before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from engine_case import Clock, Row, arguments, medians, novel_ids, show, with_artifact

import llmc
from llmc.runtime.decoding.options import Options


def ask(engine: Any, prompts: list[list[int]], tokens: int, shared: bool, clock: Clock) -> tuple[Row, list[list[int]]]:
    """Seconds, rows read for prompts, and the answers."""
    before, start = engine.stats, clock.now()
    options = Options(max_tokens=tokens, ignore_eos=True)
    queries = [engine.add_query(p, options, salt="" if shared else f"user {n}") for n, p in enumerate(prompts)]
    answers, first_s = dict[int, list[int]](), dict[int, float]()
    while engine.query_count:
        for result in engine.infer():
            first_s.setdefault(result.id, clock.now() - start)
            if result.done is not None:
                answers[result.id] = result.done.ids
    seconds, after = clock.now() - start, engine.stats
    rows = after.rows - before.rows - len(prompts) * (tokens - 1)  # of each query's tokens the last is fed to nobody
    figures = {
        "prompt_rows": rows,
        "hit_tokens": after.hit_tokens - before.hit_tokens,
        "seconds": seconds,
        "last_first_token_s": max(first_s.values()),
    }
    return figures, [answers[query] for query in queries]


def prefix_round(model: Any, prompts: list[list[int]], tokens: int, clock: Clock) -> dict[str, Row]:
    """A row without sharing, one with it, and one where the prefix was there before."""
    engine, rows, first = model.engine, {}, None
    for name, shared in (("not shared", False), ("shared", True), ("later", True)):
        rows[name], answers = ask(engine, prompts, tokens, shared, clock)
        first = first or answers
        assert answers == first, f"{name}: other tokens"
        if name == "not shared":
            engine.forget_prefixes()
    engine.forget_prefixes()
    assert engine.stats.pages_free == engine.stats.pages
    alone = rows["not shared"]
    for row in rows.values():
        row["less_work"], row["faster"] = alone["prompt_rows"] / row["prompt_rows"], alone["seconds"] / row["seconds"]
    return rows


def main() -> None:
    """Run the rounds, print the table."""
    parser = arguments(__doc__, threads=1, rounds=3, queries=20, prefix=1500, own=10, tokens=16)
    options = parser.parse_args()

    def measure(artifact: Path) -> list[Row]:
        cache = options.queries * (options.prefix + options.own + options.tokens + 16)
        with llmc.load(artifact, threads=options.threads, cache_tokens=2 * cache, drafts=0) as model:
            ids = novel_ids(model, options.prefix + options.queries * options.own)
            prefix, rest = ids[: options.prefix], ids[options.prefix :]
            prompts = [prefix + rest[n * options.own : (n + 1) * options.own] for n in range(options.queries)]
            return medians(
                [prefix_round(model, prompts, options.tokens, Clock(options.threads)) for _ in range(options.rounds)]
            )

    rows = with_artifact(options.artifact, measure)
    show(f"{options.queries} queries over a prefix of {options.prefix} tokens", rows, options.json)


if __name__ == "__main__":
    main()
