"""A draft model: what it guesses, that it never falls out of step with the text, and when it is asked at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.decoding.lookup import Lookup
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.learned import Odds, Pace, chance_ground
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation, Options
from llmc.runtime.loading.manifest import KvLayout
from llmc.runtime.runner import Runner

MakeEngine = Callable[..., Engine]
MakeDraft = Callable[..., Runner]
PROMPT = [int(id_) for id_ in np.random.default_rng(3).integers(6, 97, 20)]
_TOGETHER = 10


class Free(Pace):
    """Steps that take no time."""

    known = True

    def of(self, rows: int) -> float:
        return 0.0


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is fed, and the text itself says nothing."""
    monkeypatch.setattr(Odds, "of", lambda odds, ground: 1.0)
    monkeypatch.setattr(Pace, "of", lambda pace, rows: 1.0)
    monkeypatch.setattr(Lookup, "guess", lambda lookup, most: ([], 0))


@pytest.fixture
def make_draft(reference: ModuleType) -> MakeDraft:
    """A function `(noise=0.0, pages=64, chunk=512, calls=None, vocab, context) -> Runner` over the NumPy step.

    noise: how far its weights are from those of the model that `make_engine` runs.
    """

    def make(
        noise: float = 0.0, pages: int = 64, chunk: int = 512, calls: list[int] | None = None,
        vocab: int = reference.VOCAB, context: int = reference.CONTEXT,
    ) -> Runner:  # fmt: skip
        pool = PagePool(KvLayout(reference.LAYERS, reference.KV_HEADS, reference.HEAD_DIM, "f32"), pages * 16)
        random = np.random.default_rng(1)
        weights = {
            name: (values + noise * random.standard_normal(values.shape) / 4).astype(np.float32)
            for name, values in reference.make_weights().items()
        }
        weights["table"] = weights["table"][:vocab]
        return Runner(reference.make_step(weights, pool.layers, calls), pool, vocab, context, chunk)

    return make


def generate(engine: Engine, prompt: list[int] = PROMPT, salt: str = "", **options: Any) -> Generation:
    stream = engine.stream(engine.add_query(prompt, Options(ignore_eos=True, **options), salt=salt))
    list(stream)
    check(engine)
    return stream.result


def check(engine: Engine) -> None:
    """No page of the draft model is lost, and none is held twice."""
    model = engine._draft_model
    assert model is not None
    holders: list[Any] = [] if model.tree is None else [model.tree]
    model.runner.pool.check([*holders, *(text.sequence for text in model._texts.values() if text is not None)])
    assert set(model._texts) <= {answer for query in engine._queries.open.values() for answer in query.answers}


def drafting(make_engine: MakeEngine, draft: Runner, most: int = 5, free: bool = True, **runner: Any) -> Engine:
    engine = make_engine(settings={"drafts": most, "draft_model": draft}, **runner)
    if free:
        assert engine._draft_model is not None
        engine._draft_model.pace = Free()
    return engine


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.1, "seed": 4}, {"repetition_penalty": 1.2}, {"n": 3, "temperature": 0.7, "seed": 1}],
    ids=str,
)
@pytest.mark.parametrize("noise", [0.0, 0.8, 3.0])
def test_what_is_said_is_the_same(
    make_engine: MakeEngine, make_draft: MakeDraft, options: dict[str, Any], noise: float
) -> None:
    alone = make_engine()
    stream = alone.stream(alone.add_query(PROMPT, Options(max_tokens=40, ignore_eos=True, **options)))
    list(stream)
    engine = drafting(make_engine, make_draft(noise))
    found = generate(engine, max_tokens=40, **options)
    for one, other in zip((found, *found.others), (stream.result, *stream.result.others), strict=True):
        assert (one.ids, one.text) == (other.ids, other.text)
    assert engine.stats.drafted > 0
    if not noise and not options:
        # One token by the step that reads the prompt, one by the first of its kind, six by each of the others.
        assert engine.stats.steps == 2 + -(-38 // 6)
        assert engine.stats.accepted == engine.stats.drafted == 40 - engine.stats.steps


@pytest.mark.usefixtures("eager")
def test_it_is_fed_what_is_certain_once(make_engine: MakeEngine, make_draft: MakeDraft) -> None:
    """And each of its guesses but the last of a step: it is wrong about some, and never falls out of step."""
    calls: list[int] = []
    engine = drafting(make_engine, make_draft(0.8, calls=calls))
    found = generate(engine, max_tokens=60)
    assert 0 < found.timings["accepted_tokens"] < found.timings["drafted_tokens"]
    right = engine.stats.accepted
    assert calls[0] == len(PROMPT) + 2  # with what the prompt's step said, and the first by which steps were timed
    assert sum(calls) <= len(PROMPT) + 60 + engine.stats.drafted - right
    again = drafting(make_engine, make_draft(0.8))
    for end in range(1, 60, 7):  # whoever reads the text anew guesses the same
        assert generate(again, PROMPT + found.ids[:end], max_tokens=60 - end).ids == found.ids[end:]


@pytest.mark.usefixtures("eager")
def test_long_texts_are_read_step_by_step_and_kept_for_the_salt(make_engine: MakeEngine, make_draft: MakeDraft) -> None:
    calls: list[int] = []
    engine = drafting(make_engine, make_draft(calls=calls, chunk=16))
    prompt = (PROMPT * 4)[:70]
    first = generate(engine, prompt, salt="a", max_tokens=40)
    assert calls[:5] == [16, 16, 16, 16, 19]  # 70 tokens and those that were said meanwhile; the last of them at once
    accepted = engine.stats.accepted
    assert accepted > 10
    calls.clear()
    assert generate(engine, prompt, salt="a", max_tokens=40).ids == first.ids
    assert max(calls) == 71 - 64  # whole pages are there
    calls.clear()
    assert generate(engine, prompt, salt="b", max_tokens=40).ids == first.ids
    assert calls[0] == 16
    engine.forget_prefixes()
    assert engine._draft_model is not None
    assert engine._draft_model.runner.pool.free_pages == 64


@pytest.mark.usefixtures("eager")
def test_where_it_cannot_go_on_it_is_done_without(make_engine: MakeEngine, make_draft: MakeDraft) -> None:
    """Its cache or context is full, it does not know a token, or what it computes is no number."""
    alone = drafting(make_engine, make_draft())
    wanted = generate(alone, max_tokens=80)
    small = drafting(make_engine, make_draft(pages=4))
    short = drafting(make_engine, make_draft(context=50))
    few = drafting(make_engine, make_draft(vocab=max(PROMPT)))
    for engine, least, most in ((small, 25, 45), (short, 15, 30), (few, 0, 0)):
        assert generate(engine, max_tokens=80).ids == wanted.ids
        assert least <= engine.stats.accepted <= most
    broken = make_draft()
    step = broken.step_function
    broken.step_function = lambda *arrays: [values * np.float32("nan") if values.dtype == np.float32 else values
                                            for values in step(*arrays)]  # fmt: skip
    engine = drafting(make_engine, broken)
    assert generate(engine, max_tokens=80).ids == wanted.ids
    assert engine.stats.drafted == 0


@pytest.mark.usefixtures("eager")
def test_it_never_guesses_what_the_model_does_not_know(make_engine: MakeEngine, make_draft: MakeDraft) -> None:
    """Vocabularies may be longer by entries that stand for nothing."""
    draft = make_draft(3.0)
    engine = drafting(make_engine, draft)
    assert engine._draft_model is not None
    engine._draft_model.vocab = 50
    fed: list[int] = []
    step = engine.runner.step_function
    engine.runner.step_function = lambda *arrays: fed.extend(arrays[0].tolist()) or step(*arrays)  # type: ignore[func-returns-value]
    found = generate(engine, max_tokens=50)
    assert engine.stats.drafted > 0
    assert all(token < 50 or token in found.ids for token in fed[len(PROMPT) :])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("call", range(1, 40, 3))
def test_an_interrupted_step_of_it_is_made_good(make_engine: MakeEngine, make_draft: MakeDraft, call: int) -> None:
    wanted = generate(drafting(make_engine, make_draft(0.8)), max_tokens=40)
    draft, left = make_draft(0.8), [call]
    step = draft.step_function

    def interrupted(*arrays: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(*arrays)

    draft.step_function = interrupted
    engine = drafting(make_engine, draft)
    engine.add_query(PROMPT, Options(max_tokens=40, ignore_eos=True))
    done = None
    while engine.query_count:
        try:
            for result in engine.infer():
                done = result.done or done
        except KeyboardInterrupt:
            check(engine)
    assert done is not None
    assert done.ids == wanted.ids
    assert done.timings["accepted_tokens"] >= wanted.timings["accepted_tokens"] - 5
    check(engine)


@pytest.mark.thorough_if(case=lambda first: first >= 10)
@pytest.mark.parametrize("first", range(0, 200, _TOGETHER))
@pytest.mark.usefixtures("eager")
def test_schedules(
    make_engine: MakeEngine, make_draft: MakeDraft, script: Callable[[str], ModuleType], first: int
) -> None:
    """Those of the oracle: whoever comes, leaves, gives way or fails, and however small the draft model's cache is."""
    schedules = script("tests/runtime/schedules.py")
    finished = accepted = refuted = 0
    for number in range(first, first + _TOGETHER):
        schedule = schedules.draw(number, ("reevaluate",))
        for arrival in schedule.arrivals[number % 3 :]:
            arrival.options = replace(arrival.options, max_tokens=arrival.options.max_tokens + 20)
        draft = make_draft((0.0, 0.4, 0.8)[number % 3], pages=(3, 9, 40)[number % 7 % 3], chunk=schedule.chunk)
        settings = schedule.settings | {"drafts": 1 + number % 9, "draft_model": draft}
        engine = make_engine(eos=schedules.EOS, settings=settings, pages=schedule.pages, chunk=schedule.chunk)
        assert engine._draft_model is not None
        engine._draft_model.pace = Free()
        engine.runner.endless = ("reevaluate",)
        schedules.play(schedule, engine)
        check(engine)
        assert not engine._draft_model._texts
        assert draft.pool.free_pages == draft.pool.num_pages
        accepted += engine.stats.accepted
        refuted += engine.stats.drafted - engine.stats.accepted
        alone = make_engine(eos=schedules.EOS, settings={"keep_prefixes": False}, pages=schedule.pages)
        alone.runner.endless = ("reevaluate",)
        finished += schedules.compare(schedule, alone, f"schedule {number}")
    assert finished > 2 * _TOGETHER
    assert accepted > 2 * _TOGETHER
    assert refuted > 2 * _TOGETHER


def test_it_is_asked_where_that_is_worth_its_time(
    make_engine: MakeEngine, make_draft: MakeDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the model takes 1, of the draft model as is said; more rows add little."""
    monkeypatch.setattr(Lookup, "guess", lambda lookup, most: ([], 0))

    def drafted(noise: float, seconds: float) -> tuple[float, int]:
        engine = drafting(make_engine, make_draft(noise), free=False)
        model = engine._draft_model
        assert model is not None
        for pace, unit in ((engine._drafter.pace, 1.0), (model.pace, seconds)):
            for rows in range(1, 17):
                pace.took(rows, unit * (1 + 0.02 * (rows - 1)))
            pace.took = lambda rows, seconds: None  # type: ignore[method-assign]
        for seed in range(3):  # it learns by the first
            before = engine.stats
            generate(engine, max_tokens=90, seed=seed)
            engine.forget_prefixes()
        steps = engine.stats.steps - before.steps
        return 90 / steps, engine.stats.drafted - before.drafted

    cheap, dear = drafted(0.0, 0.05), drafted(0.0, 2.0)
    assert cheap[0] > 4  # tokens a step
    assert 2 <= dear[1] <= 3  # one in 32 steps is tried
    wrong = drafted(3.0, 0.05)
    assert wrong[1] <= 8
    some = drafted(0.8, 0.1)
    assert 1.3 < some[0] < cheap[0]


def test_chances_are_told_apart() -> None:
    odds = Odds()
    assert [chance_ground(chance, False) for chance in (0.0, 0.09, 0.11, 0.999, 1.0)] == [17, 17, 18, 26, 26]
    assert [chance_ground(chance, True) for chance in (0.0, 0.11, 1.0)] == [28, 29, 37]
    grounds = [*range(27), *range(28, 38)]
    assert odds.of(17) < odds.of(20) < odds.of(26) < 1
    for drawn in (False, True):
        ground = chance_ground(0.35, drawn)
        before, others = [odds.of(each) for each in grounds], odds.of_models(not drawn)
        for _ in range(50):
            odds.tried(ground, True)
        assert odds.of(ground) > 0.9 > before[grounds.index(ground)]
        assert odds.of_models(drawn) > 0.9
        assert odds.of_models(not drawn) == others
        changed = [each for each, chance in zip(grounds, before, strict=True) if odds.of(each) != chance]
        assert changed == [ground]


def test_without_drafts_it_is_refused(make_engine: MakeEngine, make_draft: MakeDraft) -> None:
    with pytest.raises(RequestError, match="drafts: got 0, with which a draft model has nothing to do"):
        make_engine(settings={"draft_model": make_draft()})
