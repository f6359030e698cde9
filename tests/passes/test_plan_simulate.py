"""The simulator: against formulas where they are exact, and laws that every run must obey; then plans made with it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.passes.plan.disaggregate import Targets, attained, disaggregate, greatest
from llmc.passes.plan.held import Model
from llmc.passes.plan.simulate import Query, Speeds, arrivals, circulate, serve
from llmc.passes.plan.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import TWO, devices, shape


def speeds(read: float = 0.01, step: float = 0.002, stages: int = 1, most: int = 64) -> Speeds:
    """Seconds a row of a prompt, and a step, shared by the stages."""

    def times(decoding: int, _context: float, rows: int, _before: int) -> tuple[float, list[float]]:
        return 0.0, [(read * rows + step * bool(decoding)) / stages] * stages

    return Speeds(times, stages, most)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.1, 5), min_size=1, max_size=6), st.floats(0, 2), st.integers(1, 9),
)  # fmt: skip
def test_micro_batches_go_round_as_fast_as_the_slowest_stage_or_the_way(
    stages: list[float], hop: float, batches: int
) -> None:
    hops = [hop] * len(stages)
    wanted = max(sum(stages) + sum(hops), batches * max(stages))
    assert circulate(stages, hops, batches, 60) == pytest.approx(wanted, rel=1e-9)


def test_a_query_alone_takes_its_steps() -> None:
    query = Query(1.0, prompt=100, new=11)
    serve([query], [speeds()], [], 40, lambda _: 9.0)
    assert query.first == pytest.approx(1 + 100 * 0.01)
    assert query.last == pytest.approx(query.first + 10 * 0.002)
    assert query.token_s == pytest.approx(0.002)


def test_apart_it_waits_for_its_keys() -> None:
    query = Query(0.0, prompt=100, new=11)
    serve([query], [speeds()], [speeds()], 40, lambda tokens: tokens * 0.001)
    assert query.first == pytest.approx(1.0)
    assert query.last == pytest.approx(1.0 + 0.1 + 10 * 0.002)


def test_a_prompt_beside_answers_slows_their_steps() -> None:
    first, other = Query(0.0, prompt=1, new=200), Query(0.05, prompt=100, new=2)
    serve([first, other], [speeds()], [], 10, lambda _: 0.0)
    assert first.last - first.first == pytest.approx(199 * 0.002 + 100 * 0.01)  # ten chunks in ten of its steps


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.5, 400), st.integers(1, 60), st.integers(1, 50), st.integers(1, 30), st.integers(1, 3),
    st.integers(1, 3), st.integers(0, 2), st.integers(1, 5),
)  # fmt: skip
def test_everyone_is_served_once_and_in_time_order(
    rate: float, number: int, prompt: int, new: int, stages: int, readers: int, answerers: int, most: int
) -> None:
    queries = arrivals(rate, number, prompt, new)
    serve(queries, [speeds(stages=stages, most=most)] * readers, [speeds(most=most)] * answerers, 16, lambda _: 0.001)
    for query in queries:
        assert query.first >= query.came + prompt * 0.01 * 0.999
        assert query.last >= query.first + (new - 1) * 0.002 / 1.001
    assert queries == sorted(queries, key=lambda query: query.came)


def test_a_busy_reader_queues_as_theory_says() -> None:
    """M/D/1: the mean wait is rho / (2 (1 - rho)) services."""
    rho, service = 0.6, 1.0
    queries = arrivals(rho / service, 6000, 100, 1, seed=3)
    serve(queries, [speeds(read=service / 100)], [], 100, lambda _: 0.0)
    wait = sum(query.first_s for query in queries) / len(queries) - service
    assert wait == pytest.approx(rho / (2 * (1 - rho)) * service, rel=0.12)


def test_the_greatest_rate_is_found() -> None:
    assert greatest(lambda rate: rate <= 7.3, 1.0, 100.0) == pytest.approx(7.3, rel=0.05)
    assert greatest(lambda rate: rate <= 0.02, 1.0, 100.0) == pytest.approx(0.02, rel=0.05)
    assert greatest(lambda rate: True, 1.0, 12.0) == pytest.approx(12.0, rel=0.05)
    assert greatest(lambda rate: False, 1.0, 12.0) == 0.0


FOUR = TWO.replace("count = 2", "count = 4")
WORK = Workload(prompt_tokens=512, new_tokens=32)


def test_phases_apart_share_the_devices_and_are_as_even_as_can_be() -> None:
    model, found = Model(shape(layers=8), "q8", "bf16"), devices(FOUR)
    plan = disaggregate(model, found, WORK, Targets(0.05, 0.002))
    assert plan.reading.devices + plan.answering.devices <= 4
    assert plan.together.devices <= 4
    bound = min(plan.reading.count * plan.reading.rate, plan.answering.count * plan.answering.rate)
    assert 0.4 * bound <= plan.goodput
    assert plan.transfer_bytes == 8 * 2 * 128 * 2 * (512 + 32)  # pages of 16 tokens, one more, one for the new token


def test_where_steps_must_be_short_phases_are_better_apart() -> None:
    """A chunk of a prompt takes longer than a token may: beside answers every prompt spoils them."""
    model = Model(shape(layers=8), "q8", "bf16")
    slow = devices(gops="{ f32 = 50, int8 = 100 }", gb_s=50)
    tight = disaggregate(model, slow, WORK, Targets(1.0, 0.0025))
    loose = disaggregate(model, slow, WORK, Targets(1.0, 0.5))
    assert tight.apart
    assert tight.goodput / tight.together_goodput > loose.goodput / loose.together_goodput


def test_targets_that_nobody_meets_are_named() -> None:
    model = Model(shape(), "q8", "bf16")
    with pytest.raises(LlmcError, match="the target of 0.001 ms a first token: the quickest takes"):
        disaggregate(model, devices(FOUR), WORK, Targets(1e-6, 1.0))
    with pytest.raises(LlmcError, match="the target of 0.001 ms a token"):
        disaggregate(model, devices(FOUR), WORK, Targets(1.0, 1e-6))
    with pytest.raises(LlmcError, match="two devices that are alike"):
        disaggregate(model, devices(count=1), WORK, Targets(1.0, 1.0))
    with pytest.raises(LlmcError, match="wanted times above 0"):
        Targets(0.0, 1.0)


def test_what_counts_as_attained() -> None:
    queries = [Query(0.0, 1, 3, first=1.0, last=1.0 + 2 * gap) for gap in (0.1, 0.2, 0.3)]
    assert attained(queries, Targets(1.0, 0.25)) == pytest.approx(2 / 3)
    assert attained(queries, Targets(0.9, math.inf)) == 0
