"""Who is let in first, who gives way, and that giving way changes nothing but the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmc.runtime.engine import scheduler
from llmc.runtime.engine.engine import Engine
from llmc.runtime.generate import Generation, Options

MakeEngine = Callable[..., Engine]


def ends(engine: Engine) -> list[int]:
    """Queries in the order in which they end."""
    found = []
    while engine.query_count:
        found += [result.id for result in engine.infer() if result.done]
    return found


def one_by_one(make_engine: MakeEngine, policy: str) -> Engine:
    return make_engine(settings={"policy": policy, "most_running": 1, "keep_prefixes": False})


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_who_comes_first_among_equals(make_engine: MakeEngine, policy: str) -> None:
    engine = one_by_one(make_engine, policy)
    queries = [engine.add_query([number] * 4, Options(max_tokens=2)) for number in range(6, 12)]
    assert ends(engine) == queries


def test_higher_priorities_go_first_and_displace(make_engine: MakeEngine) -> None:
    engine = one_by_one(make_engine, "priority")
    wish = Options(max_tokens=6, ignore_eos=True)
    low, middle = (engine.add_query([7] * 4, wish, priority=priority) for priority in (0, 1))
    engine.infer()
    assert engine.stats.running == 1
    high = engine.add_query([8] * 4, wish, priority=2)
    assert ends(engine) == [high, middle, low]
    assert engine.stats.preempted == 1  # the middle one, by the high one


def test_a_user_with_many_queries_does_not_keep_others_out(make_engine: MakeEngine) -> None:
    engine = one_by_one(make_engine, "fair")
    wish = Options(max_tokens=6, ignore_eos=True)
    many = [engine.add_query([7] * 4, wish, user="busy") for _ in range(5)]
    few = [engine.add_query([8] * 4, wish, user="quiet") for _ in range(2)]
    order = ends(engine)
    assert order == [many[0], few[0], many[1], few[1], *many[2:]]
    assert one_by_one(make_engine, "fcfs").stats.preempted == 0


def test_a_user_who_was_away_has_saved_nothing(make_engine: MakeEngine) -> None:
    engine = one_by_one(make_engine, "fair")
    wish = Options(max_tokens=20, ignore_eos=True)
    [engine.add_query([7] * 4, wish, user="busy") for _ in range(2)]
    while engine.stats.tokens < 30:  # one has ended, and the other is going on
        engine.infer()
    late = [engine.add_query([8] * 4, wish, user="late") for _ in range(3)]
    busy = engine.add_query([7] * 4, wish, user="busy")
    assert ends(engine)[-1] == late[-1]  # had it begun at nothing, all of its queries would go before the busy one's
    assert busy


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("keep", [True, False])
def test_giving_way_changes_no_token(make_engine: MakeEngine, preemption: str, keep: bool) -> None:
    """Six answers of three pages each in a cache of nine."""
    prompts = [[number] * 10 for number in range(6, 12)]
    wish = Options(max_tokens=38, temperature=1.2, seed=3, ignore_eos=True)

    def run(engine: Engine) -> list[Generation]:
        queries = [engine.add_query(prompt, wish) for prompt in prompts]
        done = {result.id: result.done for result in engine.follow(queries) if result.done}
        return [done[query] for query in queries]

    small = make_engine(pages=9, settings={"preemption": preemption, "keep_prefixes": keep})
    assert [each.ids for each in run(small)] == [each.ids for each in run(make_engine())]
    assert small.stats.preempted > 0
    small.forget_prefixes()
    assert small.stats.pages_free == 9


def test_a_swapped_query_is_not_read_again(make_engine: MakeEngine) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls, settings={"preemption": "swap", "keep_prefixes": False})
    stream = engine.stream(engine.add_query([7] * 50, Options(max_tokens=6, ignore_eos=True)))
    next(stream)
    engine._scheduler.give_way()
    assert (engine.stats.pages_free, engine.stats.running) == (64, 0)
    list(stream)
    assert calls == [50, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("back_first", [True, False])
def test_a_query_that_waits_for_its_caller_can_give_way(
    make_engine: MakeEngine, preemption: str, back_first: bool
) -> None:
    engine = make_engine(settings={"preemption": preemption, "keep_prefixes": False})
    query = engine.add_query([7] * 20, Options(max_tokens=3), choose="caller")
    assert len(engine.infer()) == 1
    engine._scheduler.give_way()
    if back_first:
        assert engine.infer() == []  # it has its pages again; its logits are told once
    engine.commit({query: (33, False)})
    told = [result for _ in range(2) for result in engine.infer()]  # the token, and the logits after it
    plain = make_engine()
    plain.add_query([*[7] * 20, 33], Options(max_tokens=3), choose="caller")
    assert [result.token for result in told] == [33, None]
    assert told[1].row.logits.tolist() == pytest.approx(plain.infer()[0].row.logits.tolist(), abs=1e-4)


@pytest.mark.parametrize("every", [5, 6, 7])
def test_beams_that_wait_for_others_keep_their_own_logits(make_engine: MakeEngine, every: int) -> None:
    """Read again in chunks, some beams have logits before others; then the search has to give way once more."""
    wish = Options(beams=3, n=3, max_tokens=14, ignore_eos=True)
    prompt = [7, 63, 9, 63, 50]
    found = []
    for chunk, times in ((512, 0), (4, 8)):
        engine = make_engine(chunk=chunk, settings={"keep_prefixes": False})
        engine.add_query(prompt, wish)
        steps, results = 0, []
        while engine.query_count:
            results += engine.infer()
            steps += 1
            if steps % every == 0 and engine.stats.preempted < times and engine.stats.running:
                engine._scheduler.give_way()
        assert engine.stats.preempted == times
        done = results[-1].done
        assert done is not None
        found.append([each.ids for each in (done, *done.others)])
    assert found[0] == found[1]


def test_prompts_beyond_a_step_s_budget_wait(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's rows far into a text may cost more than a step has: nothing is left for who comes next, no less."""
    monkeypatch.setattr(scheduler, "_FAR_SLOTS", 1)
    engine = make_engine(chunk=20, settings={"keep_prefixes": False})
    engine.add_query([5], Options(max_tokens=60, ignore_eos=True))
    first, second = (
        engine.add_query([first, *range(1, 80)], Options(max_tokens=1, prefill_chunk=rows))
        for first, rows in ((7, 4), (8, 1))
    )
    done = {}
    while engine.query_count:
        done |= {result.id: result.done for result in engine.infer() if result.done}
    assert [done[query].finish_reason for query in (first, second)] == ["length", "length"]
