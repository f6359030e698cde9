"""A step that fails: nobody has moved, and only the query at fault ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.window import Window
from llmc.runtime.errors import CacheFull
from llmc.runtime.generate import Generation, Options

MakeEngine = Callable[..., Engine]
POISON = 96
PROMPTS = [[7, 8, 9], [10] * 20, [11, POISON, 12], [13] * 33, [14], [15, 16] * 9]


def results(engine: Engine, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[Generation]:
    wishes = Options(**{"max_tokens": 10, "ignore_eos": True, **options})
    queries = [engine.add_query(prompt, wishes) for prompt in prompts]
    done = {result.id: result.done for result in engine.follow(queries) if result.done}
    engine.runner.pool.check([] if engine.tree is None else [engine.tree])
    return [done[query] for query in queries]


def on_step(engine: Engine, change: Callable[..., Any]) -> None:
    """Have `change(step, tokens, arrays)` stand for the compiled step."""
    step = engine.runner.step_function
    engine.runner.step_function = lambda *arrays: change(step, arrays[0], arrays)


def test_a_query_that_breaks_the_step_is_found(make_engine: MakeEngine) -> None:
    wanted = results(make_engine(), banned=[POISON])
    calls: list[int] = []
    engine = make_engine()

    def poisoned(step: Callable[..., Any], tokens: Any, arrays: Any) -> Any:
        calls.append(len(tokens))
        if POISON in tokens:
            raise RuntimeError("the kernel does not like it")
        return step(*arrays)

    on_step(engine, poisoned)
    found = results(engine, banned=[POISON])
    assert [each.ids for number, each in enumerate(found) if number != 2] == [
        each.ids for number, each in enumerate(wanted) if number != 2
    ]
    assert (found[2].finish_reason, found[2].ids) == ("error", [])
    assert found[2].error == "the step failed: RuntimeError: the kernel does not like it"
    assert len(calls) <= 10 + 2 * 3  # it was looked for by halves


def test_a_row_that_is_no_number_ends_its_query_alone(make_engine: MakeEngine) -> None:
    wanted = results(make_engine(), banned=[POISON])
    engine = make_engine()

    def broken(step: Callable[..., Any], tokens: Any, arrays: Any) -> Any:
        logits, *rest, normalizers = step(*arrays)
        for at, row in enumerate(arrays[-1]):
            if POISON in tokens[arrays[2] == arrays[2][row]]:
                logits[at], normalizers[at] = np.nan, np.nan
        return logits, *rest, normalizers

    on_step(engine, broken)
    found = results(engine, banned=[POISON])
    assert [each.ids for each in found[:2] + found[3:]] == [each.ids for each in wanted[:2] + wanted[3:]]
    assert found[2].finish_reason == "error"
    assert "not finite" in (found[2].error or "")


def test_a_failure_that_passes_hurts_nobody(make_engine: MakeEngine) -> None:
    wanted = results(make_engine())
    engine, calls = make_engine(), iter(range(10**6))

    def sometimes(step: Callable[..., Any], tokens: Any, arrays: Any) -> Any:
        if next(calls) % 4 == 0:
            raise MemoryError
        return step(*arrays)

    on_step(engine, sometimes)
    assert [each.ids for each in results(engine)] == [each.ids for each in wanted]


def test_pages_that_are_refused_make_somebody_give_way(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = results(make_engine())
    engine = make_engine()
    need, calls = engine.runner.pool.need, iter(range(10**6))

    def refusing(counts: Any) -> None:
        if next(calls) % 3 == 1:
            raise CacheFull("no page to be had")
        need(counts)

    monkeypatch.setattr(engine.runner.pool, "need", refusing)
    found = results(engine)
    assert [each.ids for each in found if each.finish_reason != "error"] == [
        each.ids for each, got in zip(wanted, found, strict=True) if got.finish_reason != "error"
    ]
    assert engine.stats.preempted > 0
    assert sum(each.finish_reason == "error" for each in found) < 3


@pytest.mark.parametrize("way", ["sinks", "reevaluate"])
def test_who_gives_way_while_it_is_planned_is_planned_anew(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """One of its answers is in the plan already, the other finds no page to slide, and then there is room again."""
    slide, calls = Window.make_room, iter(range(10**6))

    def refusing(window: Window, *given: Any) -> list[int]:
        if next(calls) == 1:
            raise CacheFull("no page to be had")
        return slide(window, *given)

    def samples() -> list[list[int]]:
        engine = make_engine(settings={"keep_prefixes": False})
        engine.runner.endless = (way,)
        engine.add_query([7] * 20, Options(max_tokens=90, ignore_eos=True))
        wish = Options(n=2, temperature=1.1, seed=3, max_tokens=40, ignore_eos=True, endless=way, window=24)
        stream = engine.stream(engine.add_query([8] * 6, wish))
        list(stream)
        return [each.ids for each in (stream.result, *stream.result.others)]

    wanted = samples()
    monkeypatch.setattr(Window, "make_room", refusing)
    assert samples() == wanted
    assert next(calls) > 2


def test_pages_that_others_hold_are_an_error_not_a_hang(make_engine: MakeEngine) -> None:
    engine = make_engine(pages=8)
    runner = engine.runner
    foreign = runner.new_sequence()
    runner.step([(foreign, [1] * 100)])
    queries = [engine.add_query([5] * 8, Options(max_tokens=4)), engine.add_query([6] * 40, Options(max_tokens=4))]
    done = {result.id: result.done for result in engine.follow(queries) if result.done}
    assert [done[query].finish_reason for query in queries] == ["length", "error"]
    assert "the KV cache is full" in (done[queries[1]].error or "")
    runner.release(foreign)
    runner.pool.check([engine.tree])


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_within_a_step_costs_no_token(make_engine: MakeEngine, when: str) -> None:
    """It comes out of whoever runs the step; the other queries say what they would have said."""
    wanted = results(make_engine())
    engine, calls = make_engine(), iter(range(10**6))

    def interrupted(step: Callable[..., Any], tokens: Any, arrays: Any) -> Any:
        stop = next(calls) in (0, 4, 9)
        if stop and when == "before":
            raise KeyboardInterrupt
        found = step(*arrays)
        if stop:
            raise KeyboardInterrupt
        return found

    on_step(engine, interrupted)
    queries = [engine.add_query(prompt, Options(max_tokens=10, ignore_eos=True)) for prompt in PROMPTS]
    done: dict[int, Generation] = {}
    interrupts = 0
    while engine.query_count:
        try:
            told = engine.infer()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        done.update({result.id: result.done for result in told if result.done})
    assert interrupts == 3
    assert [done[query].ids for query in queries] == [each.ids for each in wanted]


def test_a_fault_of_the_engine_leaves_nobody_waiting(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine._scheduler, "plan", broken)
    assert {each.error for each in results(engine)} == {"the step failed: ZeroDivisionError: "}
    assert engine.query_count == 0


def test_a_query_that_comes_while_the_engine_fails_ends_with_the_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not planned yet: ended, and taken in after that, it would break every later step."""
    engine = make_engine()
    late: list[int] = []

    def broken() -> None:
        late.append(engine.add_query([5, 6, 7], Options(max_tokens=4)))
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(engine._scheduler, "plan", broken)
        assert {each.error for each in results(engine)} == {"the step failed: ZeroDivisionError: "}
    (told,) = engine.follow(late)
    assert told.done is not None
    assert told.done.error == "the step failed: ZeroDivisionError: "
    assert [each.ids for each in results(engine)] == [each.ids for each in results(make_engine())]
    assert (engine.query_count, engine.stats.running) == (0, 0)


def test_pages_that_do_not_come_back_end_their_query_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(settings={"preemption": "swap", "keep_prefixes": False})
    wish = Options(max_tokens=10, ignore_eos=True)
    for prompt in PROMPTS:
        engine.add_query(prompt, wish)
    while engine.stats.tokens < 12:
        engine.infer()
    with monkeypatch.context() as patched:
        patched.setattr("llmc.runtime.engine.room.put_back", lambda *_: [][0])
        engine._scheduler.give_way()
        told = engine.infer()
    while engine.query_count:
        told += engine.infer()
    ends = Counter(result.done.finish_reason for result in told if result.done)
    assert ends == {"length": len(PROMPTS) - 1, "error": 1}
    engine.runner.pool.check([])
    assert engine.stats.pages_free == engine.stats.pages
