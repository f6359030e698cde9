"""Layers in several stages: as many steps are under way, and each query has the tokens that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.engine.engine import Engine
from llmc.runtime.generate import Generation, Options
from llmc.runtime.loading.manifest import KvLayout
from llmc.runtime.runner import Runner
from llmc.runtime.text.tokenizer import Tokenizer

PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(6, 97, n)] for n in (3, 17, 40, 1, 9, 30)]
EIGHT = Options(max_tokens=8, ignore_eos=True)


@pytest.fixture
def make_staged(
    script: Callable[[str], ModuleType], reference: ModuleType, make_tokenizer_json: Callable[..., bytes]
) -> Callable[..., tuple[Engine, Any]]:
    """A function `(stages, pages=64, chunk=512, eos=(), **settings) -> (Engine, LateStage)` over the NumPy step."""
    late = script("tests/runtime/late_stage.py")
    layout = KvLayout(reference.LAYERS, reference.KV_HEADS, reference.HEAD_DIM, "f32")

    def make(stages: int, pages: int = 64, chunk: int = 512, eos: Any = (), **settings: Any) -> tuple[Engine, Any]:
        own, its = PagePool(layout, pages * 16), PagePool(layout, pages * 16)
        stage = late.LateStage(its, reference.make_step(reference.make_weights(), its.layers))
        runner = Runner(print, own, reference.VOCAB, reference.CONTEXT, chunk)
        stage.lead(runner, stages)
        return Engine(runner, Tokenizer(make_tokenizer_json()), frozenset(eos), **settings), stage

    return make


MakeStaged = Callable[..., tuple[Engine, Any]]


def run(engine: Engine, prompts: list[list[int]] = PROMPTS, options: Options = EIGHT) -> list[Generation]:
    queries = [engine.add_query(prompt, options) for prompt in prompts]
    done = {result.id: result.done for result in engine.follow(queries) if result.done}
    engine.runner.pool.check([] if engine.tree is None else [engine.tree])
    return [done[query] for query in queries]


def greedy(reference: ModuleType, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [reference.greedy(reference.make_weights(), prompt, EIGHT.max_tokens) for prompt in prompts]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_step_begins_before_the_one_before_has_ended(
    make_staged: MakeStaged, reference: ModuleType, stages: int
) -> None:
    engine, stage = make_staged(stages)
    assert [each.ids for each in run(engine)] == greedy(reference)
    steps = engine.stats.steps
    order = {event: place for place, event in enumerate(stage.events)}
    for number in range(steps - stages):  # all that are followed by as many
        assert order["begin", number + stages - 1] < order["wait", number] < order["begin", number + stages]


def test_answers_are_dealt_out_evenly(make_staged: MakeStaged) -> None:
    engine, stage = make_staged(2)
    queries = [engine.add_query([7 + n], Options(max_tokens=9 + 8 * (n > 3), ignore_eos=True)) for n in range(8)]
    list(engine.follow(queries))
    assert stage.rows[:17] == [8, *[4] * 16]  # the prompts are too short to be read apart
    assert set(stage.rows[-14:]) == {2}  # of four that are left


def test_one_stage_ends_each_step_at_once(make_engine: Callable[..., Engine]) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls)
    run(engine)
    assert calls == [sum(map(len, PROMPTS)), *[len(PROMPTS)] * 7]


def test_a_query_alone_is_in_one_step_at_a_time(make_staged: MakeStaged, reference: ModuleType) -> None:
    engine, stage = make_staged(2)
    assert run(engine, PROMPTS[:1])[0].ids == greedy(reference)[0]
    assert stage.events == [(what, number) for number in range(8) for what in ("begin", "wait")]


def test_chunks_of_a_prompt_follow_each_other(make_staged: MakeStaged, reference: ModuleType) -> None:
    engine, stage = make_staged(2, chunk=32)
    assert run(engine, [[7] * 80])[0].ids == greedy(reference, [[7] * 80])[0]
    assert stage.rows[:5] == [16] * 5  # the rows of a step are those of both
    assert stage.events[:4] == [("begin", 0), ("begin", 1), ("wait", 0), ("begin", 2)]


def test_a_prompt_is_fed_so_without_an_engine_too(make_staged: MakeStaged, reference: ModuleType) -> None:
    engine, stage = make_staged(2)
    runner = engine.runner
    output = runner.prefill([(runner.new_sequence(), [7] * 40), (runner.new_sequence(), [9] * 5)], chunk=16)
    assert stage.events[:3] == [("begin", 0), ("begin", 1), ("wait", 0)]
    whole = [reference.whole(reference.make_weights(), ids)[-1] for ids in ([7] * 40, [9] * 5)]
    np.testing.assert_allclose(output.logits, whole, atol=1e-4)


def test_what_is_being_read_is_waited_for(make_staged: MakeStaged) -> None:
    engine, _ = make_staged(2, pages=256)
    shared = [int(i) for i in np.random.default_rng(5).integers(6, 97, 64)]
    run(engine, [[*shared, 10 + number] for number in range(8)], Options(max_tokens=1))
    assert engine.stats.rows == 64 + 8


def test_a_query_that_is_cancelled_under_way_leaves_the_others_alone(
    make_staged: MakeStaged, reference: ModuleType
) -> None:
    engine, _ = make_staged(2, pages=12, keep_prefixes=False)
    queries = [engine.add_query(prompt, EIGHT) for prompt in PROMPTS]
    wanted = dict(zip(queries, greedy(reference), strict=True))
    engine.infer()
    for query in queries[::2]:
        engine.cancel(query)
    late = engine.add_query(PROMPTS[5], EIGHT)  # takes the pages that a step under way still writes to
    wanted[late] = wanted[queries[5]]
    done = {result.id: result.done.ids for result in engine.follow([*queries[1::2], late]) if result.done}
    assert done == {query: wanted[query] for query in (*queries[1::2], late)}
    engine.runner.pool.check([])


def test_an_interrupt_while_steps_are_under_way(make_staged: MakeStaged, reference: ModuleType) -> None:
    engine, stage = make_staged(2)
    queries = [engine.add_query(prompt, EIGHT) for prompt in PROMPTS]
    results = [*engine.infer(), *engine.infer()]
    stage.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        engine.infer()
    while engine.query_count:
        results += engine.infer()
    done = {result.id: result.done.ids for result in results if result.done}
    assert [done[query] for query in queries] == greedy(reference)


@pytest.mark.thorough_if(case=lambda stages: stages == 3)
@pytest.mark.parametrize("stages", [2, 3])
def test_the_oracle(
    make_staged: MakeStaged, make_engine: Callable[..., Engine], script: Callable[[str], ModuleType], stages: int
) -> None:
    """test_oracle.py, where steps are late."""
    schedules, preempted, finished = script("tests/runtime/schedules.py"), 0, 0
    for number in range(1000, 1025):
        schedule = schedules.draw(number, ("reevaluate",))
        wishes = {**schedule.settings, "preemption": "recompute", "prefill": "chunked"}
        engine, _ = make_staged(stages, schedule.pages, schedule.chunk, schedules.EOS, **wishes)
        engine.runner.endless = ("reevaluate",)
        preempted += schedules.play(schedule, engine)
        alone = make_engine(eos=schedules.EOS, settings={"keep_prefixes": False}, pages=schedule.pages)
        alone.runner.endless = ("reevaluate",)
        finished += schedules.compare(schedule, alone, f"schedule {number}")
    assert finished > 50
    assert preempted > 12


def test_a_text_without_end(script: Callable[[str], ModuleType], make_tokenizer_json: Callable[..., bytes]) -> None:
    """Keys are turned, and pages copied, in the order of the steps."""
    endless, late = script("tests/runtime/endless_step.py"), script("tests/runtime/late_stage.py")
    layout = KvLayout(endless.LAYERS, endless.GROUPS, endless.SIZE, "f32")
    options = [
        Options(max_tokens=60, endless="sinks", n_discard=4, window=40),
        Options(max_tokens=50, endless="shift", n_discard=3, window=32, temperature=0.7, seed=5, n=2),
        Options(max_tokens=30),
    ]

    def make(stages: int) -> Engine:
        own, its = PagePool(layout, 640), PagePool(layout, 640)
        step, turn = endless.make_functions(endless.make_weights(), its.layers, endless.PLACES["rope"])
        runner = Runner(
            step, its if stages == 1 else own, endless.VOCAB, endless.CONTEXT, 24, turn_function=turn,
            endless=("sinks", "shift"),
        )  # fmt: skip
        if stages > 1:
            late.LateStage(its, step, turn).lead(runner, stages)
        return Engine(runner, Tokenizer(make_tokenizer_json()))

    alone = [run(make(1), [prompt], wishes)[0] for prompt, wishes in zip(PROMPTS, options, strict=False)]
    engine = make(2)
    queries = [engine.add_query(prompt, wishes) for prompt, wishes in zip(PROMPTS, options, strict=False)]
    done = {result.id: result.done for result in engine.follow(queries) if result.done}
    for query, wanted in zip(queries, alone, strict=True):
        assert done[query].ids == wanted.ids
        assert [each.ids for each in done[query].others] == [each.ids for each in wanted.others]
