"""The oracle: whatever else is in the engine, and whatever happens to it, a query says what it says alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.learned import Odds, Pace

SCHEDULES = 200
_TOGETHER = 10


@pytest.fixture(scope="session")
def schedules(script: Callable[[str], ModuleType]) -> ModuleType:
    """The module schedules.py."""
    return script("tests/runtime/schedules.py")


@pytest.mark.thorough_if(case=lambda first: 3 * first >= SCHEDULES)
@pytest.mark.parametrize("first", range(0, SCHEDULES, _TOGETHER))
def test_a_query_says_what_it_says_alone(make_engine: Callable[..., Engine], schedules: ModuleType, first: int) -> None:
    """200 schedules over a model in NumPy; tests/end_to_end/test_oracle.py has compiled ones."""
    preempted = finished = 0
    for number in range(first, first + _TOGETHER):
        schedule = schedules.draw(number, ("reevaluate",))
        engine = make_engine(eos=schedules.EOS, settings=schedule.settings, pages=schedule.pages, chunk=schedule.chunk)
        engine.runner.endless = ("reevaluate",)
        preempted += schedules.play(schedule, engine)
        alone = make_engine(eos=schedules.EOS, settings={"keep_prefixes": False}, pages=schedule.pages)
        alone.runner.endless = ("reevaluate",)
        finished += schedules.compare(schedule, alone, f"schedule {number}")
    assert finished > 2 * _TOGETHER
    assert preempted > _TOGETHER // 2


@pytest.mark.thorough_if(case=lambda first: 4 * first >= SCHEDULES)
@pytest.mark.parametrize("first", range(0, SCHEDULES, _TOGETHER))
def test_where_steps_follow_each_other(
    make_engine: Callable[..., Engine], schedules: ModuleType, script: Callable[[str], ModuleType], first: int
) -> None:
    """The same on a device that does nothing before its answers are wanted; queries give way while steps follow."""
    late = script("tests/runtime/late_device.py")
    finished = follows = 0
    for number in range(first, first + _TOGETHER):
        schedule = replace(schedules.draw(number, ()), failing=set())
        for arrival in schedule.arrivals[number % 3 :]:  # in most of them all are greedy
            wishes = arrival.options
            arrival.options = Options(max_tokens=wishes.max_tokens + 9, ignore_eos=wishes.ignore_eos)
        engine = make_engine(eos=schedules.EOS, settings=schedule.settings, pages=schedule.pages, chunk=schedule.chunk)
        device = late.LateDevice(engine.runner)
        schedules.play(schedule, engine)
        follows += device.follows
        alone = make_engine(eos=schedules.EOS, settings={"keep_prefixes": False}, pages=schedule.pages)
        finished += schedules.compare(schedule, alone, f"schedule {number}")
    assert finished > 2 * _TOGETHER
    assert follows > 2 * _TOGETHER


@pytest.mark.thorough_if(case=lambda first: 8 * first >= SCHEDULES)
@pytest.mark.parametrize("first", range(0, SCHEDULES, _TOGETHER))
def test_where_tokens_are_drafted(
    make_engine: Callable[..., Engine], schedules: ModuleType, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The same where every guess is fed that there is, right or wrong."""
    monkeypatch.setattr(Odds, "of", lambda odds, agreed: 1.0)
    monkeypatch.setattr(Pace, "of", lambda pace, rows: 1.0)
    finished = drafted = accepted = 0
    for number in range(first, first + _TOGETHER):
        schedule = schedules.draw(number, ("reevaluate",))
        for arrival in schedule.arrivals[number % 3 :]:
            wishes = arrival.options
            arrival.options = replace(wishes, max_tokens=wishes.max_tokens + 20)
        settings = schedule.settings | {"drafts": 1 + number % 9}
        engine = make_engine(eos=schedules.EOS, settings=settings, pages=schedule.pages, chunk=schedule.chunk)
        engine.runner.endless = ("reevaluate",)
        schedules.play(schedule, engine)
        drafted += engine.stats.drafted
        accepted += engine.stats.accepted
        alone = make_engine(eos=schedules.EOS, settings={"keep_prefixes": False}, pages=schedule.pages)
        alone.runner.endless = ("reevaluate",)
        finished += schedules.compare(schedule, alone, f"schedule {number}")
    assert finished > 2 * _TOGETHER
    assert drafted > accepted > 5 * _TOGETHER
