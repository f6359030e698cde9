"""Drafts: what is guessed, what steps make of guesses, and that nothing else comes of them than speed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.decoding.chooser import Chooser
from llmc.runtime.decoding.lookup import Lookup
from llmc.runtime.engine.drafts import MOST_ROWS, Draft, Drafter
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.learned import FORCED, Odds, Pace
from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.generate import Generation, Options
from llmc.runtime.runner import Runner

MakeEngine = Callable[..., Engine]
PROMPT = [int(id_) for id_ in np.random.default_rng(3).integers(6, 97, 20)]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is fed."""
    monkeypatch.setattr(Odds, "of", lambda odds, ground: 1.0)
    monkeypatch.setattr(Pace, "of", lambda pace, rows: 1.0)


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What every text is guessed to go on as, from its 20th token on: for the test to fill."""
    whole: list[int] = []

    def guess(lookup: Lookup, most: int) -> tuple[list[int], int]:
        found = whole[len(lookup) - len(PROMPT) :][:most]
        return found, 2 if found else 0

    monkeypatch.setattr(Lookup, "guess", guess)
    return whole


def generate(engine: Engine, **options: Any) -> Generation:
    stream = engine.stream(engine.add_query(PROMPT, Options(**options)))
    list(stream)
    return stream.result


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.1, "seed": 4}, {"strategy": "mirostat", "seed": 1},
                                     {"repetition_penalty": 1.2}, {"logprobs": 3}], ids=str)  # fmt: skip
@pytest.mark.parametrize("wrong_at", [None, 0, 1, 6, 13])
def test_what_is_said_is_the_same_in_fewer_steps(
    make_engine: MakeEngine, guesses: list[int], options: dict[str, Any], wrong_at: int | None
) -> None:
    alone = generate(make_engine(), max_tokens=17, ignore_eos=True, **options)
    guesses += alone.ids
    if wrong_at is not None:
        guesses[wrong_at] = (guesses[wrong_at] + 1) % 97
    engine = make_engine(settings={"drafts": 5})
    found = generate(engine, max_tokens=17, ignore_eos=True, **options)
    assert (found.ids, found.text, found.finish_reason) == (alone.ids, alone.text, alone.finish_reason)
    assert found.logprobs == alone.logprobs
    # The first token is said by the step that reads the prompt; then six at a time, unless one is refuted.
    steps = 1 + len(steps_of(17, 5, wrong_at))
    assert engine.stats.steps == steps
    assert engine.stats.tokens == 17
    assert engine.stats.rows == len(PROMPT) + steps - 1 + engine.stats.drafted
    assert engine.stats.accepted == 17 - steps
    engine.forget_prefixes()
    assert engine.stats.pages_free == engine.stats.pages


def steps_of(tokens: int, most: int, wrong_at: int | None) -> list[int]:
    """Tokens that each step behind the first says, if all guesses are right but that of one token."""
    said, steps = 1, []
    while said < tokens:
        right = min(most, tokens - said - 1)
        if wrong_at is not None and said <= wrong_at < said + right:
            right = wrong_at - said
        steps.append(right + 1)
        said += right + 1
    return steps


@pytest.mark.usefixtures("eager")
def test_an_answer_may_end_within_a_draft(make_engine: MakeEngine, guesses: list[int]) -> None:
    guesses += generate(make_engine(), max_tokens=20, ignore_eos=True).ids
    for end in range(20):
        if guesses[end] in guesses[:end]:
            continue
        engine = make_engine(eos=(guesses[end],), settings={"drafts": 7})
        found = generate(engine, max_tokens=20)
        assert (found.ids, found.finish_reason) == (guesses[: end + 1], "stop")
        again = generate(engine, max_tokens=20)  # from what the cache has kept of the first
        assert again.ids == found.ids


@pytest.mark.usefixtures("eager")
def test_what_is_kept_for_others_is_what_was_said(make_engine: MakeEngine, guesses: list[int]) -> None:
    alone = generate(make_engine(pages=64), max_tokens=60, ignore_eos=True)
    guesses += [id_ if number % 7 else (id_ + 1) % 97 for number, id_ in enumerate(alone.ids)]
    engine = make_engine(pages=64, settings={"drafts": 6})
    assert generate(engine, max_tokens=60, ignore_eos=True).ids == alone.ids
    rows = engine.stats.rows
    longer = PROMPT + alone.ids[:50]
    stream = engine.stream(engine.add_query(longer, Options(max_tokens=10, ignore_eos=True)))
    list(stream)
    assert stream.result.ids == alone.ids[50:]
    assert engine.stats.hit_tokens == 64
    assert engine.stats.rows - rows < len(longer)


@pytest.mark.usefixtures("eager")
def test_nobody_gives_way_for_a_guess(
    make_engine: MakeEngine, guesses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer needs a fourth page by the time that the other has ended; its guesses would take it before."""
    alone = generate(make_engine(), max_tokens=40, ignore_eos=True)
    guesses += alone.ids
    guess, other = Lookup.guess, [7] * 8
    monkeypatch.setattr(
        Lookup, "guess", lambda lookup, most: ([], 0) if lookup._ids[0] == other[0] else guess(lookup, most)
    )
    engine = make_engine(pages=4, settings={"drafts": 7})
    first = engine.add_query(PROMPT, Options(max_tokens=40, ignore_eos=True))
    engine.add_query(other, Options(max_tokens=8, ignore_eos=True))
    said = {}
    while engine.query_count:
        said |= {result.id: result.done.ids for result in engine.infer() if result.done}
    assert said[first] == alone.ids
    assert engine.stats.preempted == 0
    assert engine.stats.accepted > 20


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_choice_that_fails_is_tried_by_the_next_step(
    make_engine: MakeEngine, guesses: list[int], monkeypatch: pytest.MonkeyPatch, fails_at: int, times: int
) -> None:
    """Within a draft; what was said before it stays said. If it fails as the first of a step, the query ends."""
    alone = generate(make_engine(), max_tokens=12, ignore_eos=True, logprobs=2)
    guesses += alone.ids
    choose, left, first = Chooser.choose, [times], (fails_at - 1) % 6 == 0  # six tokens a step

    def failing(chooser: Chooser, row: Any) -> Any:
        if chooser._said == fails_at and left[0]:
            left[0] -= 1
            raise LlmcError("no such luck")
        return choose(chooser, row)

    monkeypatch.setattr(Chooser, "choose", failing)
    engine = make_engine(settings={"drafts": 5})
    engine.add_query(PROMPT, Options(max_tokens=12, ignore_eos=True, logprobs=2))
    tokens = []
    while engine.query_count:
        results = engine.infer()
        tokens += [result.token for result in results if result.token is not None]
    done = results[-1].done
    assert done is not None
    assert tokens == done.ids
    if first or times == 2:
        assert done.error == "no such luck"
        assert tokens == guesses[:fails_at]
    else:
        assert tokens == guesses
        assert done.logprobs == alone.logprobs


@pytest.mark.usefixtures("eager")
def test_who_is_not_drafted_for(
    make_engine: MakeEngine, make_runner: Callable[..., Runner], guesses: list[int]
) -> None:
    """Neither by the text, nor by a draft model."""
    guesses += range(50)
    calls: list[int] = []
    engine = make_engine(settings={"drafts": 7, "draft_model": make_runner(calls=calls)})
    generate(engine, max_tokens=6, beams=3)
    query = engine.add_query(PROMPT, Options(max_tokens=4), choose="caller")
    while engine.query_count:
        for result in engine.infer():
            if result.row is not None:
                engine.commit({query: (7, False)})
    engine.runner.endless = ("reevaluate",)
    generate(engine, max_tokens=60, endless="reevaluate", window=34, n_discard=6, ignore_eos=True)
    assert engine.stats.drafted == 0
    assert not calls


@pytest.mark.usefixtures("eager")
def test_what_was_said_to_others_is_guessed_by(make_engine: MakeEngine) -> None:
    """To those of the same salt, until it is forgotten, and never where nothing is kept."""

    def accepted(engine: Engine, salt: str) -> int:
        before = engine.stats.accepted
        wishes = Options(max_tokens=30, ignore_eos=True, temperature=9.0, seed=5)
        stream = engine.stream(engine.add_query(PROMPT, wishes, salt=salt))
        list(stream)
        said.add(tuple(stream.result.ids))
        return engine.stats.accepted - before

    said: set[tuple[int, ...]] = set()
    engine = make_engine(settings={"drafts": 7})
    alone = accepted(engine, "a")
    assert accepted(engine, "a") >= 20 > alone
    assert accepted(engine, "b") == alone
    assert accepted(engine, "b") >= 20
    engine.forget_prefixes()
    assert accepted(engine, "a") == alone
    engine = make_engine(settings={"drafts": 7, "keep_prefixes": False})
    assert [accepted(engine, "a") for _ in range(2)] == [alone] * 2
    assert len(said) == 1


@pytest.mark.usefixtures("eager")
def test_a_prediction_is_guessed_by(make_engine: MakeEngine) -> None:
    """Whole, or where the answer turns out another one; what is said is the same."""
    wishes: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 9.0, "seed": 5}
    alone = generate(make_engine(), **wishes)
    engine = make_engine(settings={"drafts": 7})
    for prediction, least in ((alone.text, 25), (alone.text[:20] + "=" + alone.text[21:], 20), ("", 0), ("no", 0)):
        engine.forget_prefixes()
        found = generate(engine, prediction=prediction, **wishes)
        assert (found.ids, found.text) == (alone.ids, alone.text)
        assert least <= found.timings["accepted_tokens"] <= found.timings["drafted_tokens"]


def test_texts_of_few_salts_are_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(settings={"drafts": 7})
    for salt in (*range(64), 0, 64):
        engine.add_query([9], Options(max_tokens=3, ignore_eos=True), salt=str(salt))
        while engine.query_count:
            engine.infer()
    assert list(map(int, engine._drafter._said)) == [*range(2, 64), 0, 64]


def test_drafts_are_checked(make_engine: MakeEngine) -> None:
    for wrong in (-1, MOST_ROWS):
        with pytest.raises(RequestError, match=rf"drafts: got {wrong}, wanted 0..15"):
            make_engine(settings={"drafts": wrong})


def test_a_text_that_nothing_speaks_for_is_hardly_guessed(make_engine: MakeEngine, guesses: list[int]) -> None:
    """Guesses that are always wrong: after a few of them there is one in 32 steps."""
    alone = generate(make_engine(), max_tokens=90, ignore_eos=True)
    guesses += [(id_ + 1) % 97 for id_ in alone.ids]
    engine = make_engine(settings={"drafts": 7})
    engine._drafter.pace.took = lambda rows, seconds: None  # type: ignore[method-assign]  # as guessed
    assert generate(engine, max_tokens=90, ignore_eos=True).ids == alone.ids
    first = engine.stats.drafted
    engine.forget_prefixes()
    generate(engine, max_tokens=90, ignore_eos=True)
    assert 0 < engine.stats.drafted - first <= 90 // 32 + 1
    assert engine.stats.accepted == 0


def test_steps_of_answers_alone_are_timed(make_engine: MakeEngine) -> None:
    engine = make_engine(settings={"drafts": 3})
    generate(engine, max_tokens=8, ignore_eos=True)
    assert 20 not in engine._drafter.pace._known
    assert 1 in engine._drafter.pace._known


def test_what_a_step_takes_is_not_known_for_ever() -> None:
    pace = Pace()
    pace.took(8, 9.0)  # something else had the machine
    for _ in range(300):
        pace.took(1, 0.01)
    assert pace.of(8) == 9.0
    for _ in range(300):
        pace.took(1, 0.01)
    assert pace.of(8) < 0.02
    for _ in range(500):
        pace.took(4, 0.012)
    assert (pace.of(4), list(pace._known)) == (pytest.approx(0.012), [4])


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=3),
    st.integers(0, 2),
    st.lists(st.floats(0.5, 3), min_size=MOST_ROWS, max_size=MOST_ROWS),
)
def test_as_many_are_fed_as_give_most_for_the_time(
    guesses: list[tuple[int, int]], others: int, seconds: list[float]
) -> None:
    """Against all ways to feed some of each guess; the chances fall, so that the likeliest of n are the best n."""
    drafter = Drafter(5)
    for rows, took in enumerate(seconds, 1):
        drafter.pace.took(rows, took)
    drafts = {number: Draft.looked_up([1] * count, agreed) for number, (count, agreed) in enumerate(guesses)}
    rows = len(drafts) + others

    def worth(counts: tuple[int, ...]) -> float:
        expected = float(rows)
        for draft, count in zip(drafts.values(), counts, strict=True):
            chance = 1.0
            for ground in draft.grounds[:count]:
                chance *= drafter.odds.of(ground)
                expected += chance
        return expected / drafter.pace.of(rows + sum(counts))

    best = max(map(worth, itertools.product(*(range(count + 1) for count, _ in guesses))))
    found = drafter._select(drafts, rows, 0).counts
    counts = tuple(found.get(number, 0) for number in drafts)
    assert worth(counts) >= best * 0.999 or (not found and best <= 1.0301 * worth((0,) * len(drafts)))


def test_what_is_learned_is_of_what_spoke_for_it() -> None:
    drafter = Drafter(7)
    before = [drafter.odds.of(agreed) for agreed in range(17)]
    drafter.learn(Draft([5, 6, 7, 8], [3, 4, 5, 6], right=2, refuted=True))
    after = [drafter.odds.of(agreed) for agreed in range(17)]
    assert [(a > b) - (a < b) for a, b in zip(after, before, strict=True)] == [0, 0, 0, 1, 1, -1, *[0] * 11]
    drafter.learn(Draft([5, 6], [FORCED, FORCED], right=1))  # the answer ended there
    assert drafter.odds.of(FORCED) > after[FORCED]
    assert (drafter.drafted, drafter.accepted) == (6, 3)
