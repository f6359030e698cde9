"""Layered prefill on the NumPy step: prompts pass through its two parts, one a step, beside answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.layered import LayeredScheduler
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation, Options
from llmc.runtime.parts import Passage
from llmc.runtime.runner import Feed, Runner

MakeEngine = Callable[..., Engine]
MakeRunner = Callable[..., Runner]
ANSWER, LONG = ([int(i) for i in np.random.default_rng(n).integers(6, 97, n)] for n in (3, 40))
OPTIONS = Options(max_tokens=30, ignore_eos=True)


def alone(make_engine: MakeEngine, prompt: list[int]) -> Generation:
    engine = make_engine()
    stream = engine.stream(engine.add_query(prompt, OPTIONS))
    list(stream)
    return stream.result


@pytest.fixture
def begun(make_engine: MakeEngine) -> Callable[..., tuple[Engine, int, int]]:
    """A function `(**settings) -> (engine, query that is answered, query whose prompt has come through one part)`."""

    def begin(pages: int = 64, **settings: Any) -> tuple[Engine, int, int]:
        engine = make_engine(pages=pages, chunk=24, settings={"prefill": "layered", **settings})
        answered = engine.add_query(ANSWER, OPTIONS)
        engine.infer()
        read = engine.add_query(LONG, OPTIONS)
        assert [result.id for result in engine.infer()] == [answered]
        assert passage_of(engine).left == 1
        return engine, answered, read

    return begin


def passage_of(engine: Engine) -> Passage:
    (passage,) = [a.passage for query in engine._scheduler.running for a in query.speaking if a.passage]
    return passage


def test_answers_go_on_while_a_prompt_passes_through_a_part_a_step(
    begun: Callable[..., tuple[Engine, int, int]], make_engine: MakeEngine
) -> None:
    engine, answered, read = begun()
    rows = engine.stats.rows
    assert passage_of(engine).rows == 40  # more than a step's 24: each part has half of the work
    results = engine.infer()
    assert {result.id for result in results} == {answered, read}
    assert engine.stats.rows == rows + 41
    done = {}
    while engine.query_count:
        done |= {result.id: result.done for result in engine.infer()}
    assert done[answered].ids == alone(make_engine, ANSWER).ids
    assert done[read].ids == alone(make_engine, LONG).ids


def test_rows_that_pass_together_cost_a_step_s_budget_in_each_part(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk=9, settings={"prefill": "layered"})
    engine.add_query(ANSWER, OPTIONS)
    engine.infer()
    engine.add_query(LONG, OPTIONS)
    fed, passages = [], []
    step = engine.runner.begin

    def note(feeds: Any) -> Any:
        fed.append([(len(feed.ids), feed.through) for feed in feeds])
        passages.extend(feed.passage for feed in feeds if feed.passage)
        return step(feeds)

    engine.runner.begin = note  # type: ignore[method-assign]
    for _ in range(7):
        engine.infer()
    # 16 rows in two parts cost what 8 do in a step of 9 with one answer; the last 8 pass both parts at once.
    assert fed == [[(1, 0), (16, 1)]] * 4 + [[(1, 0), (8, 0)]] + [[(1, 0), (1, 0)]] * 2
    assert [passage.left for passage in passages] == [0] * 4


def test_with_no_answers_beside_it_a_prompt_is_read_as_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk=24, settings={"prefill": "layered"})
    engine.add_query(LONG, OPTIONS)
    engine.infer()
    assert engine.stats.rows == 24


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_gives_way_begins_again(
    begun: Callable[..., tuple[Engine, int, int]], make_engine: MakeEngine, preemption: str
) -> None:
    engine, answered, read = begun(preemption=preemption)
    engine._scheduler.give_way()
    (waiting,) = engine._scheduler.waiting
    assert waiting.id == read
    assert not any(answer.passage for answer in waiting.answers)
    done = {}
    while engine.query_count:
        done |= {result.id: result.done for result in engine.infer()}
    assert done[answered].ids == alone(make_engine, ANSWER).ids
    assert done[read].ids == alone(make_engine, LONG).ids


def test_who_is_cancelled_gives_its_pages_back(begun: Callable[..., tuple[Engine, int, int]]) -> None:
    engine, answered, read = begun(keep_prefixes=False)
    engine.cancel(read)
    engine.infer()
    (running,) = engine._scheduler.running
    assert running.id == answered
    engine.runner.pool.check(running.sequences)


def test_a_part_that_fails_moves_nothing(make_runner: MakeRunner) -> None:
    runner = make_runner()
    plain, answer, long = runner.new_sequence(), runner.new_sequence(), runner.new_sequence()
    wanted = runner.step([Feed(plain, LONG, "all")]).logits
    runner.step([Feed(answer, ANSWER)])
    free, passage, good = runner.pool.free_pages, Passage(40, 2), runner.parts
    assert good is not None

    def broken(*arrays: Any) -> Any:
        raise MemoryError

    runner.parts = replace(good, parts=(good.parts[0], broken))
    with pytest.raises(MemoryError):
        runner.step([Feed(answer, [7]), Feed(long, LONG, "none", passage, 1)])
    assert (passage.left, passage.x, answer.length, runner.pool.free_pages) == (2, None, 3, free)
    runner.parts = good
    runner.step([Feed(long, LONG, "none", passage, 1)])
    assert (passage.left, long.length, runner.pool.free_pages) == (1, 0, free - 3)
    runner.parts = replace(good, head=broken)
    x = passage.x
    with pytest.raises(MemoryError):
        runner.step([Feed(answer, [7]), Feed(long, LONG, "all", passage, 1)])
    assert (passage.left, answer.length, long.length, runner.pool.free_pages) == (1, 3, 0, free - 3)
    assert passage.x is x
    runner.parts = good
    output = runner.step([Feed(answer, [7]), Feed(long, LONG, "all", passage, 1)])
    np.testing.assert_allclose(output.logits[1:], wanted, atol=1e-6)
    assert (passage.left, passage.x, long.length, long.position) == (0, None, 40, 40)


@pytest.mark.parametrize(("ids", "through"), [([7], 0), ([7], 3), ([7, 8], 1)])
def test_a_feed_goes_as_its_passage_says(make_runner: MakeRunner, ids: list[int], through: int) -> None:
    runner, said = make_runner(), f"{len(ids)} tokens through {through} parts, whose passage has 1 and 2 ahead"
    with pytest.raises(RequestError, match=said):
        runner.step([Feed(runner.new_sequence(), ids, passage=Passage(1, 2), through=through)])
    runner.parts = None
    with pytest.raises(RequestError, match="--layer-groups"):
        runner.step([Feed(runner.new_sequence(), [7], passage=Passage(1, 2), through=1)])


def test_wishes_that_cannot_be_met_are_refused(make_runner: MakeRunner, make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match="prefill: got 'fast', wanted one of chunked, layered"):
        make_engine(settings={"prefill": "fast"})
    runner = make_runner()
    runner.parts = None
    tokenizer = make_engine()._intake.tokenizer
    with pytest.raises(RequestError, match="--layer-groups"):
        Engine(runner, tokenizer, prefill="layered")
    assert isinstance(make_engine(settings={"prefill": "layered"})._scheduler, LayeredScheduler)
