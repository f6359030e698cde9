"""Schedules for the oracle: what queries come when, and what happens to them.

A schedule is drawn from a number: when which queries come, what they ask for, how long they are, what they share, who
is cancelled, how small the cache is, how queries give way and when they have to, who goes first, which steps fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmc.runtime.decoding.lookup import Lookup
from llmc.runtime.engine.engine import Engine
from llmc.runtime.generate import Generation, Options

VOCAB = 97
EOS = frozenset({5})
_STRATEGIES: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.9},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.95},
    {"temperature": 1.1, "min_p": 0.05, "repetition_penalty": 1.3},
    {"strategy": "mirostat"},
    {"strategy": "fsd"},
    {"strategy": "random_fsd"},
    {"temperature": 1.2, "typical_p": 0.9, "presence_penalty": 0.4, "logit_bias": {7: 2.0}},
    {"temperature": 0.8, "n": 3},
    {"beams": 3, "n": 2},
]
_WINDOW = {"window": 34, "n_discard": 6}


@dataclass
class Arrival:
    """A query of a schedule: the step it comes in, and after how many it is cancelled, if it is."""

    step: int
    prompt: list[int]
    options: Options
    wishes: dict[str, Any]
    cancelled: int | None
    id: int = 0
    done: Generation | None = None


@dataclass(frozen=True)
class Schedule:
    """All that is drawn from a number. failing: calls of the step that fail. giving_way: steps after which a query has
    to give way, though there are pages."""

    arrivals: list[Arrival]
    pages: int
    chunk: int
    settings: dict[str, Any]
    failing: set[int]
    giving_way: set[int]


def draw(number: int, endless: tuple[str, ...]) -> Schedule:
    """The schedule with this number; `endless`: modes of text without end that the model knows."""
    dice = random.Random(number)
    shared = [[dice.randrange(6, VOCAB) for _ in range(dice.choice([5, 16, 32, 48]))] for _ in range(2)]
    arrivals = []
    for _ in range(dice.randint(3, 7)):
        tail = [dice.randrange(6, VOCAB) for _ in range(dice.randint(1, 12))]
        strategy = dict(dice.choice(_STRATEGIES))
        if not strategy.get("beams"):
            strategy["seed"] = dice.randrange(10)
        most = dice.choice([dice.randint(1, 8), dice.randint(8, 28)])
        if endless and "beams" not in strategy and "n" not in strategy and dice.random() < 0.15:
            strategy |= {"endless": dice.choice(endless), **_WINDOW}
            most = 45
        chunk = dice.choice([None, 1, 3, 16])
        options = Options(max_tokens=most, prefill_chunk=chunk, ignore_eos=dice.random() < 0.5, **strategy)
        wishes = {"priority": dice.randrange(3), "user": dice.choice("ab"), "salt": dice.choice(["", "", "x"])}
        cancelled = dice.randint(0, 30) if dice.random() < 0.2 else None
        prompt = dice.choice([[], *shared]) + tail
        arrivals.append(Arrival(dice.randint(0, 25), prompt, options, wishes, cancelled))
    settings = {
        "policy": dice.choice(["fcfs", "priority", "fair"]),
        "preemption": dice.choice(["recompute", "swap"]),
        "keep_prefixes": dice.random() < 0.7,
        "most_running": dice.choice([2, 5, 256]),
    }
    failing = {dice.randrange(60) for _ in range(3)} if dice.random() < 0.3 else set()
    giving_way = {dice.randrange(50) for _ in range(dice.choice([0, 2, 8]))}
    settings["prefill"] = dice.choice(["chunked", "layered"])
    return Schedule(arrivals, dice.randint(13, 18), dice.choice([4, 20, 512]), settings, failing, giving_way)


def play(schedule: Schedule, engine: Engine) -> int:
    """Run a schedule, with all checks after every step; how often a query gave way."""
    step_function, parts = engine.runner.step_function, engine.runner.parts
    if schedule.failing:
        engine.runner.step_function = _failing(step_function, schedule.failing)
    if parts is not None:
        engine.runner.parts = replace(parts, parts=(*parts.parts[:-1], _failing(parts.parts[-1], schedule.failing)))
    of: dict[int, Arrival] = {}
    to_come = sorted(schedule.arrivals, key=lambda arrival: arrival.step)
    step = 0
    while to_come or engine.query_count:
        while to_come and to_come[0].step <= step:
            arrival = to_come.pop(0)
            arrival.id = engine.add_query(arrival.prompt, arrival.options, **arrival.wishes)
            of[arrival.id] = arrival
        for arrival in of.values():
            if arrival.cancelled is not None and arrival.step + arrival.cancelled == step:
                engine.cancel(arrival.id)
        for result in engine.infer():
            of[result.id].done = result.done or of[result.id].done
        if step in schedule.giving_way and engine._scheduler.running:
            engine._scheduler.give_way()
        _check(engine)
        step += 1
        assert step < 3000, "the engine does not get on"
    engine.runner.step_function, engine.runner.parts = step_function, parts
    engine.forget_prefixes()
    assert engine.runner.pool.free_pages == engine.runner.pool.num_pages
    return engine.stats.preempted


def compare(schedule: Schedule, engine: Engine, name: str) -> int:
    """Compare what the queries of a schedule said with what each says in an `engine` of its own; how many did."""
    finished = 0
    for arrival in schedule.arrivals:
        if arrival.done is None:
            assert arrival.cancelled is not None
            continue
        stream = engine.stream(engine.add_query(arrival.prompt, replace(arrival.options, prefill_chunk=None)))
        list(stream)
        if arrival.done.finish_reason == "error":  # a step failed that it was alone in
            assert schedule.failing
            assert arrival.options.beams > 1 or arrival.done.ids == stream.result.ids[: len(arrival.done.ids)]
            continue
        finished += 1
        assert told(arrival.done) == told(stream.result), f"{name}: query {arrival.id}, {arrival.options}"
    return finished


def told(generation: Generation) -> list[tuple[list[int], str, str]]:
    """What of a generation must not depend on anything."""
    return [(each.ids, each.text, each.finish_reason) for each in (generation, *generation.others)]


def texts_of(arrival: Arrival) -> list[list[int]]:
    """The tokens of a query's prompt and answer, of each of its answers."""
    if arrival.done is None:
        return []
    return [arrival.prompt + each.ids for each in (arrival.done, *arrival.done.others)]


def guess_from(texts: list[list[int]]) -> Callable[[Lookup, int], tuple[list[int], int]]:
    """A `Lookup.guess` that knows how texts go on, but for one token in seven."""

    def guess(lookup: Lookup, most: int) -> tuple[list[int], int]:
        ids = lookup._ids[: len(lookup)].tolist()
        for text in texts:
            if len(text) > len(ids) and text[: len(ids)] == ids:
                found = enumerate(text[len(ids) :][:most], len(ids))
                return [id_ if place % 7 else (id_ + 1) % VOCAB for place, id_ in found], 2
        return [], 0

    return guess


def _check(engine: Engine) -> None:
    """Pages have exactly the holders that they should have, and what a query is to be fed is what it lacks."""
    holders: list[Any] = [] if engine.tree is None else [engine.tree]
    for query in engine._scheduler.running:
        assert query.state == "running"
        holders += query.sequences
        for answer in query.speaking:
            assert answer.sequence is not None
            assert answer.slid or answer.sequence.length + len(answer.todo) == len(query.reads(answer))
            assert answer.todo or answer.under_way or answer.row is not None
    for query in engine._scheduler.waiting:
        assert query.state == "waiting"
        assert not any(sequence.pages for sequence in query.sequences)
    engine.runner.pool.check(holders)


def _failing(step: Any, failing: set[int]) -> Any:
    """The compiled step, of which some calls raise before they do anything, as if memory had run out."""
    calls = iter(range(10**6))

    def flaky(*arrays: Any) -> Any:
        if next(calls) in failing:
            raise MemoryError("no memory for the step")
        return step(*arrays)

    return flaky
