"""Prompts in a ring: formulas against a simulation of every device and link, bytes against counting them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.passes.plan.held import Model
from llmc.passes.plan.ring import WAYS, plan_ring, ring, ring_s, simulated_ring_s
from llmc.passes.plan.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import TWO, devices, shape
from test_partition_models import STRUCTURES

FOUR = devices(TWO.replace("count = 2", "count = 4"))
MODEL = Model(shape(), "q8", "bf16")
WORK = Workload(prompt_tokens=4096, new_tokens=1)


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 9), st.floats(0.1, 9), st.floats(0.01, 9), st.booleans())
def test_the_formula_is_what_a_simulation_gives(count: int, work: float, send: float, halves: bool) -> None:
    assert ring_s(count, work, send, halves) == pytest.approx(simulated_ring_s(count, work, send, halves), rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_bytes_are_those_that_go_round(count: int) -> None:
    members = list(FOUR.devices[:count])
    one, both, queries = (ring(MODEL, FOUR, members, WORK, way) for way in WAYS)
    tokens, kv, hidden, heads = -(-4096 // count), 128, 256, 8
    assert (one.forward, one.backward) == ((count - 1) * tokens * 2 * kv * 4, 0)
    assert both.forward == both.backward == one.forward / 2
    asked = (count - 1) * tokens * hidden * 4  # to all others
    answers = count * tokens * (hidden + heads) * 4  # and home
    assert queries.forward + queries.backward == asked + answers
    assert queries.forward == queries.backward


def test_both_ways_are_never_slower_than_one_and_more_bandwidth_never_hurts() -> None:
    for count in (2, 4):
        for factor in (0.01, 1, 100):
            found = devices(TWO.replace("count = 2", "count = 4"), gb_s=factor)
            more = devices(TWO.replace("count = 2", "count = 4"), gb_s=3 * factor)
            plans = [ring(MODEL, found, list(found.devices[:count]), WORK, way) for way in WAYS]
            assert plans[1].total_s <= plans[0].total_s
            for plan, way in zip(plans, WAYS, strict=True):
                assert ring(MODEL, more, list(more.devices[:count]), WORK, way).total_s <= plan.total_s


def test_many_tokens_hide_the_sends_and_share_the_work() -> None:
    quick = devices(TWO.replace("count = 2", "count = 4"), gb_s=100)
    found = plan_ring(MODEL, quick, replace(WORK, prompt_tokens=60_000))
    assert found.best.devices == 4
    assert found.best.hidden == 1
    assert 3 < found.alone_s / found.best.total_s < 4.2
    assert {plan.devices for plan in found.plans} == {2, 4}


def test_few_tokens_are_not_worth_the_way() -> None:
    slow = devices(TWO, gb_s=0.001)
    found = plan_ring(MODEL, slow, replace(WORK, prompt_tokens=64))
    assert found.best.total_s > found.alone_s


def test_what_cannot_go_round_is_named() -> None:
    with pytest.raises(LlmcError, match="keys and values of its own"):
        plan_ring(Model(STRUCTURES["latents"], "f32", "f32"), FOUR, WORK)
    with pytest.raises(LlmcError, match="two devices that are alike"):
        plan_ring(MODEL, devices(count=1), WORK)
    with pytest.raises(LlmcError, match=r"nothing fits; on 4 devices each needs .* has 0.00 GB"):
        plan_ring(MODEL, devices(TWO.replace("count = 2", "count = 4"), memory_gb=0.001), WORK)
