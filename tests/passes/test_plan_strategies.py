"""What is tried, what is picked, why others are refused, and what goes to a host."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.compiler.errors import LlmcError
from llmc.passes.plan.held import Model
from llmc.passes.plan.offload import choose, offloads, with_host
from llmc.passes.plan.predict import predict
from llmc.passes.plan.strategies import divisors, name_of, rank, strategies
from llmc.passes.plan.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import TWO, devices, shape

WORK = Workload(prompt_tokens=100, new_tokens=20, queries=8)
GPU = """
[[node]]
latency_us = 5
gb_s = 100
host_gb_s = 20
[[node.device]]
name = "cuda"
count = 2
memory_gb = 1
read_gb_s = 1000
gops = { f32 = 10_000 }
[[node.device]]
name = "cpu"
memory_gb = 1
read_gb_s = 20
gops = { f32 = 200 }
"""


def test_all_divisions_of_all_divisors_are_tried() -> None:
    model = Model(shape(layers=8), "q8", "bf16")
    tried = strategies(model, devices(TWO.replace("count = 2", "count = 8")), WORK, "latency")
    sizes = {(each.count, len(each.placement.stages)) for each in tried}
    assert sizes == {(used, stages) for used in divisors(8) for stages in divisors(used)}
    assert all(each.replicas == 8 // each.count for each in tried)


@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_the_pick_is_the_best_of_what_fits(goal: str) -> None:
    model = Model(shape(layers=8), "q8", "bf16")
    chosen = choose(model, devices(TWO.replace("count = 2", "count = 4"), latency_us=1), WORK, goal)
    fitting = [each for each in chosen.strategies if not each.refused]
    assert rank(chosen.best, goal) == min(rank(each, goal) for each in fitting)
    if goal == "latency":
        assert chosen.best.prediction is not None
        assert (
            chosen.best.prediction.token_s <= min(each.prediction.token_s for each in fitting if each.prediction) * 1.01
        )


def test_reasons_name_the_device_and_what_it_lacks() -> None:
    model = Model(shape(), "f32", "f32")
    small = devices(memory_gb=0.01)
    tried = {str(each.placement): each for each in strategies(model, small, WORK, "latency")}
    needs = predict(shape(), "f32", small, "0", replace(WORK, queries=4), kv="f32").memory[0].needs
    assert tried["0"].refused == f"device 0 needs {needs / 1e9:.2f} GB, has 0.01 GB"
    many = devices(TWO.replace("count = 2", "count = 16"))
    tried = {name_of(each.placement): each for each in strategies(model, many, WORK, "latency")}
    assert "16 devices cannot share 4 layers" in tried["0..15, 16 stages"].refused
    assert "16 devices cannot share 8 heads" in tried["0..15, by tensor"].refused


def test_nothing_fits_names_the_shortest_gap() -> None:
    with pytest.raises(
        LlmcError, match=r"nothing fits; the nearest is 0[;&]1, 0.01 GB short: device \d needs .* GB, has 0.00 GB"
    ):
        choose(Model(shape(), "f32", "f32"), devices(memory_gb=0.001), WORK, "latency")


def test_unlike_devices_share_by_what_they_do() -> None:
    text = (
        TWO.replace("count = 2", "count = 1")
        + """
[[node.device]]
name = "1"
memory_gb = 1
read_gb_s = 30
gops = { f32 = 300, bf16 = 600, int8 = 1200 }
"""
    )
    found = devices(text.replace("latency_us = 10", "latency_us = 0"))
    model = Model(shape(layers=16, heads=16, kv_heads=16), "f32", "f32")
    tried = [each for each in strategies(model, found, WORK, "latency") if each.devices == "0&1"]
    times = {each.split: each.prediction.token_s for each in tried if each.prediction}
    assert times["1:3"] < times[None]


def test_balance_gives_the_stage_with_the_head_fewer_layers() -> None:
    spec, work = shape(layers=12), replace(WORK, queries=128)  # so many that multiplying takes longer than reading
    model = Model(replace(spec, sizes=replace(spec.sizes, vocab=8192)), "q8", "bf16")
    tried = strategies(model, devices(latency_us=1), work, "throughput")
    equal, moved = (each for each in tried if each.devices == "0;1")
    assert equal.split is None
    assert moved.split is not None
    first, last = map(int, moved.split.split(":"))
    assert first > last
    assert moved.tokens_per_s > equal.tokens_per_s


def test_as_few_layers_as_can_be_go_to_the_host() -> None:
    spec = shape(layers=24)
    model = Model(spec, "f32", "f32")
    weights = predict(spec, "f32", devices(), "0", WORK, kv="f32").memory[0].needs / 1e9
    found = devices(GPU.replace("count = 2", "count = 1").replace("memory_gb = 1", f"memory_gb = {0.6 * weights}", 1))
    chosen = choose(model, found, WORK, "latency")
    assert chosen.offload is not None
    assert chosen.best.devices == "cuda:0;cpu:0"
    count = chosen.offload.layers
    held = {each.stage: each.layer_count for each in model.held(chosen.best.placement)}
    assert held == {0: 24 - count, 1: count}
    assert chosen.best.prediction is not None
    assert chosen.best.prediction.fits
    fewer = with_host(model, [[found.by_name["cuda:0"]]], found.by_name["cpu:0"], count - 1)
    assert not predict(spec, "f32", found, fewer, WORK, kv="f32").fits
    assert chosen.offload.words == f"{count} of 24 layers on cpu:0"


def test_stages_of_two_and_a_host_have_the_layers_that_were_asked_for() -> None:
    model, found = Model(shape(layers=12), "q8", "bf16"), devices(GPU)
    groups = [[found.by_name["cuda:0"], found.by_name["cuda:1"]]]
    held = model.held(with_host(model, groups, found.by_name["cpu:0"], 5))
    assert [each.layer_count for each in held] == [7, 7, 5]


def test_pages_go_to_the_host_where_only_they_do_not_fit() -> None:
    spec, work = shape(layers=4), Workload(prompt_tokens=4000, new_tokens=50, queries=8)
    model = Model(spec, "q8", "f32")
    one = predict(spec, "q8", devices(), "0", work, kv="f32").memory[0]
    assert one.pages > one.weights + one.working
    room = (one.needs - 0.5 * one.pages) / 1e9
    found = devices(GPU.replace("count = 2", "count = 1").replace("memory_gb = 1", f"memory_gb = {room}", 1))
    plans = [each for each in offloads(model, found, work) if not each.layers]
    assert plans
    (plan,) = plans
    assert plan.pages == pytest.approx(0.5, rel=1e-6)
    assert plan.pages_bytes == pytest.approx(0.5 * one.pages, rel=1e-6)
    whole = predict(spec, "q8", devices(GPU.replace("memory_gb = 1", "memory_gb = 9", 1)), "cuda:0", work, kv="f32")
    assert plan.strategy.prediction is not None
    assert plan.strategy.prediction.token_s > whole.token_s
    assert plan.strategy.prediction.fits


def test_without_a_host_nothing_is_offloaded() -> None:
    assert offloads(Model(shape(), "q8", "bf16"), devices(), WORK) == []
