"""The engine step by step: what goes into a step, who chooses tokens, what several answers share."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from llmc.runtime.decoding.beams import BeamSearch
from llmc.runtime.decoding.candidates import Row
from llmc.runtime.engine import step as stepping
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.results import StepResult
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation, Options

MakeEngine = Callable[..., Engine]
PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(6, 97, n)] for n in (3, 17, 40, 1)]


def generate(engine: Engine, prompt: list[int], **options: Any) -> Generation:
    stream = engine.stream(engine.add_query(prompt, Options(**options)))
    list(stream)
    return stream.result


def drain(engine: Engine) -> list[StepResult]:
    """All results until nothing is left to do."""
    results = []
    while engine.query_count:
        results += engine.infer()
    return results


def test_a_step_tells_each_query_s_token(make_engine: MakeEngine, reference: ModuleType) -> None:
    engine = make_engine()
    assert engine.infer() == []
    queries = [engine.add_query(prompt, Options(max_tokens=3, ignore_eos=True)) for prompt in PROMPTS]
    assert engine.query_count == engine.stats.waiting == 4
    wanted = [reference.greedy(reference.make_weights(), prompt, 3) for prompt in PROMPTS]
    for step in range(3):
        results = engine.infer()
        assert [result.id for result in results] == queries
        assert [result.token for result in results] == [ids[step] for ids in wanted]
        assert [result.done is not None for result in results] == [step == 2] * 4
    assert [result.done.ids for result in results if result.done] == wanted
    assert engine.query_count == 0
    assert engine.infer() == []
    stats = engine.stats
    assert (stats.steps, stats.tokens, stats.rows, stats.running) == (3, 12, sum(map(len, PROMPTS)) + 8, 0)


def test_the_caller_chooses(make_engine: MakeEngine, reference: ModuleType) -> None:
    engine = make_engine(eos=(5,))
    mine = engine.add_query(PROMPTS[1], Options(max_tokens=9), choose="caller")
    other = engine.add_query(PROMPTS[0], Options(max_tokens=6, ignore_eos=True))
    said = [33, 70, 11]
    for number, token in enumerate(said):
        (result,) = [result for result in engine.infer() if result.id == mine and result.row is not None]
        assert result.token is None
        logits = reference.whole(reference.make_weights(), PROMPTS[1] + said[:number])[-1]
        np.testing.assert_allclose(result.row.logits, logits, atol=1e-4)
        kept = result.row.logits.copy()
        assert [r.id for r in engine.infer()] == [other]  # it goes on, this one waits
        np.testing.assert_array_equal(result.row.logits, kept)
        for wrong in ({mine: (97, False)}, {mine: (1, False), other: (1, False)}, {mine: (1, False), 99: (1, False)}):
            with pytest.raises(RequestError):
                engine.commit(wrong)
        engine.commit({mine: (token, number == 2)})
        with pytest.raises(RequestError, match="does not wait"):
            engine.commit({mine: (token, False)})
    (done,) = [result.done for result in drain(engine) if result.id == mine and result.done]
    assert (done.ids, done.finish_reason) == (said, "stop")
    for impossible in ({"n": 2, "temperature": 1.0}, {"beams": 2}):
        with pytest.raises(RequestError, match="choose"):
            engine.add_query([1], Options(**impossible), choose="caller")
    with pytest.raises(RequestError, match="choose: got 'me'"):
        engine.add_query([1], choose="me")


def test_a_caller_s_token_can_end_and_can_be_the_last(make_engine: MakeEngine) -> None:
    engine = make_engine(eos=(5,))
    for token, most, reason in ((5, 9, "stop"), (7, 1, "length")):
        query = engine.add_query([1, 2], Options(max_tokens=most), choose="caller")
        while not engine.infer():
            pass
        engine.commit({query: (token, False)})
        (result,) = engine.infer()
        assert result.done is not None
        assert (result.done.ids, result.done.finish_reason) == ([token], reason)


def test_a_long_prompt_holds_nobody_up(make_engine: MakeEngine) -> None:
    """While it is read in chunks, each step also has a row of every answer."""
    calls: list[int] = []
    engine = make_engine(chunk=20, calls=calls)
    first = engine.add_query([1, 2], Options(max_tokens=30, ignore_eos=True))
    engine.infer()
    second = engine.add_query([3] * 90, Options(max_tokens=2, ignore_eos=True))
    told = []
    while second not in [result.id for result in told]:
        told = engine.infer()
        assert first in [result.id for result in told]
    assert max(calls) <= 20
    assert 90 / 19 < len(calls) - 1 < 9
    assert [result.done.ids for result in drain(engine) if result.id == first and result.done] == [
        generate(make_engine(), [1, 2], max_tokens=30, ignore_eos=True).ids
    ]


def test_equal_beginnings_are_read_once(make_engine: MakeEngine) -> None:
    shared = [int(i) for i in np.random.default_rng(5).integers(6, 97, 64)]
    prompts = [[*shared, 10 + number] for number in range(8)]
    engine = make_engine(pages=256, chunk=16)
    queries = [engine.add_query(prompt, Options(max_tokens=1)) for prompt in prompts]
    done = {result.id: result.done for result in drain(engine) if result.done}
    assert engine.stats.rows == 64 + 8  # though all of them came at once
    assert engine.stats.hit_tokens == 7 * 64
    assert done[queries[3]].timings["prefill_tokens"] == 1
    for query, prompt in zip(queries, prompts, strict=True):
        assert done[query].ids == generate(make_engine(), prompt, max_tokens=1).ids
    before = engine.stats.rows
    generate(engine, prompts[0], max_tokens=1)
    assert engine.stats.rows == before + 1
    stream = engine.stream(engine.add_query(prompts[0], Options(max_tokens=1), salt="another's"))
    list(stream)
    assert engine.stats.rows == before + 1 + 65
    engine.forget_prefixes()
    assert engine.stats.pages_kept == 0
    assert engine.stats.pages_free == 256


def test_samples_are_those_of_their_seeds(make_engine: MakeEngine) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls)
    chance: dict[str, Any] = {"temperature": 1.3, "max_tokens": 12, "ignore_eos": True}
    query = engine.add_query(PROMPTS[2], Options(n=3, seed=7, **chance))
    results = drain(engine)
    assert calls == [40, *[3] * 11]  # the prompt was read once
    done = results[-1].done
    assert done is not None
    wanted = [generate(make_engine(), PROMPTS[2], seed=7 + sample, **chance) for sample in range(3)]
    assert [each.ids for each in (done, *done.others)] == [each.ids for each in wanted]
    for sample in range(3):
        pieces = [result.text for result in results if result.answer == sample]
        assert "".join(pieces) == wanted[sample].text
    assert {result.id for result in results} == {query}
    with pytest.raises(RequestError, match="leave no room for an answer in a cache_tokens of 64 for 3 answers"):
        make_engine(pages=4).add_query([1] * 40, Options(n=3, temperature=1.0))


def test_beams_are_those_of_a_search_without_a_cache(make_engine: MakeEngine, reference: ModuleType) -> None:
    options = Options(beams=3, n=3, max_tokens=8, length_penalty=0.6)
    weights, prompt = reference.make_weights(), PROMPTS[1]
    search = BeamSearch.start(options, prompt, reference.VOCAB, 8, {5})
    while not search.done:
        texts = [prompt + list(live.ids) for live in search.live]
        search = search.after([Row.of(reference.whole(weights, ids)[-1].astype(np.float32)) for ids in texts])
    engine = make_engine(eos=(5,))
    found = engine.stream(engine.add_query(prompt, options))
    list(found)
    answers = [found.result, *found.result.others]
    assert [each.ids for each in answers] == [list(best.ids) for best in search.best(3)]
    assert [each.finish_reason for each in answers] == ["stop" if b.ended else "length" for b in search.best(3)]
    assert len({tuple(each.ids) for each in answers}) == 3
    engine.runner.pool.check([engine.tree])


def test_logprobs_and_stop_strings(make_engine: MakeEngine, reference: ModuleType) -> None:
    plain = generate(make_engine(), PROMPTS[1], max_tokens=12, logprobs=2)
    assert plain.logprobs is not None
    for number, choice in enumerate(plain.logprobs):
        logits = reference.whole(reference.make_weights(), PROMPTS[1] + plain.ids[:number])[-1]
        shares = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert choice.logprob == pytest.approx(shares[plain.ids[number]], abs=1e-4)
        assert [token for token, _ in choice.top] == np.argsort(-shares)[:2].tolist()
    text = plain.text
    stop = text[4:6]
    stopped = generate(make_engine(), PROMPTS[1], max_tokens=12, stop=[stop])
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


def test_samples_of_a_text_without_end(make_engine: MakeEngine) -> None:
    """The prompt is longer than the window, so what is forked has slid already."""
    prompt = [int(i) for i in np.random.default_rng(9).integers(6, 97, 50)]
    wish: dict[str, Any] = {
        "endless": "reevaluate", "window": 24, "n_keep": 3, "temperature": 1.1, "max_tokens": 40, "ignore_eos": True,
    }  # fmt: skip

    def engine(**settings: Any) -> Engine:
        made = make_engine(settings=settings)
        made.runner.endless = ("reevaluate",)
        return made

    shared = engine()
    found = shared.stream(shared.add_query(prompt, Options(n=3, seed=4, **wish)))
    list(found)
    wanted = [generate(engine(keep_prefixes=False), prompt, seed=4 + sample, **wish).ids for sample in range(3)]
    assert [each.ids for each in (found.result, *found.result.others)] == wanted
    assert generate(shared, prompt, seed=5, **wish).ids == wanted[1]  # of its pages none is kept for what it is not


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "lifo"}, "policy: got 'lifo', wanted one of fcfs, priority, fair"),
        ({"preemption": "no"}, "preemption: got 'no', wanted one of recompute, swap"),
        ({"most_running": 0}, "most_running: got 0"),
    ],
)
def test_settings_are_checked(make_engine: MakeEngine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_engine(settings=settings)


def test_queries_are_checked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for prompt, message in (([], "empty"), ([97], "0..96"), ([[1]], "flat list"), ([1] * 120, "no room")):
        with pytest.raises(RequestError, match=message):
            engine.add_query(prompt)
    with pytest.raises(RequestError, match="no encoder"):
        engine.add_query([1], source=[1])
    with pytest.raises(RequestError, match="query 7: there is none"):
        engine.stream(7)
    engine.cancel(7)
    assert engine.query_count == 0


def test_a_cancelled_query_gives_its_pages_back_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(settings={"keep_prefixes": False})
    running, waiting = engine.add_query([1] * 30), engine.add_query([2] * 30)
    engine.infer()
    other = engine.add_query([3] * 30)
    engine.cancel(running)
    engine.cancel(running)
    assert engine.stats.pages_free == 64 - 2
    engine.cancel(waiting)
    engine.cancel(other)
    assert engine.stats.pages_free == 64
    assert (engine.query_count, engine.infer()) == (0, [])


def test_freed_memory_goes_back_when_nothing_is_left_after_many_rows(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then too; a few rows are not worth it, and nobody waits for it while something is left to do."""
    given: list[int] = []
    monkeypatch.setattr(stepping, "IDLE_ROWS", 40)
    monkeypatch.setattr(stepping, "EVERY_ROWS", 110)
    engine = make_engine(settings={"keep_prefixes": False})
    monkeypatch.setattr(stepping, "give_back", lambda: given.append(engine.stats.rows))
    generate(engine, PROMPTS[1], max_tokens=2, ignore_eos=True)
    assert given == []
    generate(engine, PROMPTS[2], max_tokens=2, ignore_eos=True)  # 17 + 1, and 40 + 1 rows
    assert given == [59]
    for prompt in [PROMPTS[2]] * 2 + [PROMPTS[1]]:
        engine.add_query(prompt, Options(max_tokens=30, ignore_eos=True))
    engine.infer()
    engine.infer()
    assert given == [59]
    while engine.stats.rows < 59 + 110:
        engine.infer()
    assert len(given) == 2
    assert engine.query_count == 3
    monkeypatch.setattr(stepping, "EVERY_STEPS", 5)
    steps = engine.stats.steps
    while engine.stats.steps < steps + 10:
        engine.infer()
    assert len(given) == 4
