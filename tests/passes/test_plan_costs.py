"""Times and memory: against formulas by hand, against the graph's own collectives, and laws that must hold."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import parse_placement
from llmc.compiler.spec.blocks import Experts, Window
from llmc.frontends.graph.build import build
from llmc.passes.partition import partition
from llmc.passes.plan import Workload, links, predict
from llmc.passes.plan.costs import Segment, greatest_of
from llmc.passes.plan.held import Model
from llmc.passes.plan.predict import Placed
from llmc.passes.plan.simulate import circulate

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import TWO, devices, shape
from test_partition_models import OTHERS, PROMISED, STRUCTURES

WORK = Workload(prompt_tokens=100, new_tokens=20, queries=4)
FOUR = TWO.replace("count = 2", "count = 4")


def test_one_token_by_hand() -> None:
    """No links, no attention to speak of: bytes over bandwidth, and the fixed parts."""
    spec = shape(layers=2)
    found = predict(spec, "f32", devices(TWO + "layer_us = 50\nstep_us = 7"), "0", WORK, kv="f32")
    layer = 256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 768 * 256
    numbers = 2 * layer + 1024 * 256  # the embedding is the head too
    kv = 2 * 2 * 128 * 4 * (100 + 21 / 2)
    assert found.token_s == pytest.approx(4 * numbers / 10e9 + kv / 10e9 + 2 * 50e-6 + 7e-6, rel=1e-9)
    vectors = 4 * (2 * 2 + 1) * 256
    assert found.memory[0].weights == 4 * numbers + vectors
    assert found.micro_batches == 1


def test_many_rows_are_bound_by_multiplying() -> None:
    spec, work = shape(), replace(WORK, prompt_tokens=512, chunk=512)
    model = Model(spec, "q8", "bf16")
    placed = Placed(model, devices(), parse_placement("0"))
    (seconds,) = placed.stages(placed.chunks(work)[0], busy=False)
    layer = 256 * 256 * 2 + 2 * 128 * 256 + 3 * 768 * 256
    head = max(2 * 1024 * 256 / 400e9, 1024 * 256 * 1.0625 / 10e9)  # one row alone wants logits: bound by reading
    assert seconds.linear == pytest.approx(4 * 2 * 512 * layer / 400e9 + head, rel=0.01)


@pytest.mark.parametrize("structure", PROMISED | OTHERS)
def test_collectives_are_those_of_the_graph(structure: str) -> None:
    spec, placed = STRUCTURES[structure], parse_placement("0&1;2&3")
    own = Placed(Model(spec, "f32", "f32"), devices(FOUR), placed)
    for part in partition(build(spec, "f32"), placed):
        for encoder in (False, True) if spec.encoder else (False,):
            counted: Counter[tuple[str, int]] = Counter()
            for name, width, count in own.costs.wires(own.held[part.stage][0], encoder):
                counted[name, width] += count
            assert counted == _wires(part.module["encode" if encoder else "step"])


def _wires(function: Any) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()

    def visit(value: Any) -> None:
        match = ops.match(value) if isinstance(value, relax.Call) else None
        if match and match[0].name in ("all_reduce", "all_gather"):
            found[match[0].name, int(value.ty_args[0].shape[1])] += 1

    relax.analysis.post_order_visit(function, visit)
    return found


def test_sums_over_a_group_by_hand() -> None:
    found = devices(FOUR)
    assert links.all_reduce(found, found.devices[:1], 1e6) == 0
    assert links.all_reduce(found, found.devices, 1e6) == pytest.approx(2 * (2 * 10e-6 + 3 / 4 * 1e6 / 10e9))
    gather = devices(FOUR.replace("gb_s = 10\n", "gb_s = 10\nall_reduce = 'gather'\n", 1))
    assert links.all_reduce(gather, gather.devices, 1e6) == pytest.approx(2 * 10e-6 + 3 * 1e6 / 10e9)
    assert links.all_gather(found, found.devices[:2], 1e6) == pytest.approx(10e-6 + 1e6 / 2 / 10e9)
    two = list(found.devices)
    assert links.hand_over(found, two[:1], two[1:2], 1e6) == pytest.approx(10e-6 + 1e6 / 10e9)


def test_times_that_vary_cost_who_waits_for_others() -> None:
    """By tensor devices meet behind every part of a layer; by layer, and alone, nobody waits for the slower."""
    steady, unsteady = devices(TWO), devices(TWO + "unsteady = 0.2")
    for placement, longer in (("0", 0.0), ("0;1", 0.0), ("0&1", 0.2 * 0.589)):
        plain, varying = (predict(shape(), "q8", found, placement, WORK) for found in (steady, unsteady))
        alone = sum(each.total - each.links for each in plain.stages)
        assert varying.token_s - plain.token_s == pytest.approx(alone * longer, rel=1e-3, abs=1e-12)
    rng = np.random.default_rng(0)
    for count in (2, 3, 8):
        assert greatest_of(count) == pytest.approx(rng.standard_normal((100_000, count)).max(1).mean(), rel=0.06)


def test_experts_are_read_as_far_as_rows_use_them() -> None:
    spec = STRUCTURES["experts"]
    times = []
    for rows in (1, 1000):
        placed = Placed(Model(spec, "f32", "f32"), devices(), parse_placement("0"))
        times.append(placed.stages([Segment(rows, 1, 8)], busy=False)[0].linear)
    slow = devices(gops="{ f32 = 1e6 }")
    one, many = (
        Placed(Model(spec, "f32", "f32"), slow, parse_placement("0")).stages([Segment(n, 1, 8)], False)[0].linear
        for n in (1, 1000)
    )
    experts = 2 * 3 * spec.experts.count * spec.experts.ffn * spec.sizes.hidden * 4 / 10e9  # two layers have them
    assert many - one == pytest.approx(experts * (1 - spec.experts.used / spec.experts.count), rel=1e-6)
    assert times[1] > times[0]


@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 40), (7, 0), (7, 3), (7, 40)])
def test_pairs_are_counted_as_rows_see(window: int, rows: int, before: int) -> None:
    seen = [min(before + row + 1, window or 10**9) for row in range(rows)]
    assert Segment(1, rows, before).pairs(window) == sum(seen)
    first = max(0, before + 1 - window) if window else 0
    assert Segment(1, rows, before).reads(window) == before + rows - first


def test_windows_keep_fewer_pages() -> None:
    work = replace(WORK, prompt_tokens=4000, chunk=64)
    whole = predict(shape(), "q8", devices(), "0", work).memory[0]
    short = predict(shape(window=Window(100, (0, 1, 2, 3), 1e4)), "q8", devices(), "0", work).memory[0]
    assert short.pages < whole.pages / 20


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("split", ["1:1", "3:1"])
def test_a_cycle_is_what_the_simulator_gives(batches: int, split: str) -> None:
    placed = Placed(Model(shape(), "q8", "bf16"), devices(), parse_placement("0;1", split))
    work = replace(WORK, queries=6)
    load = placed.decoding(work, -(-work.queries // batches))
    times = [each.total for each in placed.stages(load, busy=batches > 1)]
    simulated = circulate(times, placed.hop_times(load), batches, 40)
    assert simulated == pytest.approx(placed.cycle(work, batches), rel=1e-9)


def test_stages_raise_throughput_and_sharing_lowers_latency() -> None:
    spec, fast = shape(layers=8, hidden=512), devices(FOUR, latency_us=1)
    whole, layer, tensor, both = (
        predict(spec, "q8", fast, text, WORK) for text in ("0", "0;1;2;3", "0&1&2&3", "0&1;2&3")
    )
    assert layer.micro_batches > 1
    assert layer.tokens_per_s > whole.tokens_per_s
    assert tensor.token_s < both.token_s < layer.token_s
    assert layer.token_s > whole.token_s
    assert layer.memory[0].needs < whole.memory[0].needs


def test_the_order_of_the_seeds_table_five() -> None:
    """One query a micro-batch: by layer most throughput and least speed, by tensor most speed, hybrid between."""
    spec, four = shape(layers=8, hidden=512), devices(FOUR, latency_us=3)
    cases = (("0;1;2;3", 4), ("0&1;2&3", 2), ("0&1&2&3", 1))
    layer, both, tensor = (
        predict(spec, "q8", four, text, Workload(64, 64, count, micro_batches=count)) for text, count in cases
    )
    assert layer.tokens_per_s > both.tokens_per_s > tensor.tokens_per_s
    assert layer.token_s > both.token_s > tensor.token_s


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["read_gb_s", "gb_s", "latency_us", "memory_gb"]), st.floats(1.01, 50),
    st.sampled_from(["0", "0;1", "0&1"]), st.sampled_from(["f32", "q8", "c4"]),
)  # fmt: skip
def test_better_devices_are_never_slower(key: str, factor: float, placement: str, format: str) -> None:
    spec, before = shape(), 1.0 if key == "memory_gb" else 10.0
    better = before / factor if key == "latency_us" else before * factor
    one = predict(spec, format, devices(), placement, WORK)
    other = predict(spec, format, devices(**{key: better}), placement, WORK)
    assert other.token_s <= one.token_s
    assert other.first_token_s <= one.first_token_s
    assert other.tokens_per_s >= one.tokens_per_s
    assert all(new.needs == old.needs for new, old in zip(other.memory, one.memory, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3000), st.integers(1, 500), st.sampled_from(["0", "0;1", "0&1"]))
def test_memory_grows_with_the_work(queries: int, prompt: int, new: int, placement: str) -> None:
    work = Workload(prompt, new, queries)
    one = predict(shape(), "q8", devices(), placement, work).memory
    for more in (
        replace(work, queries=queries + 1),
        replace(work, prompt_tokens=2 * prompt),
        replace(work, new_tokens=2 * new),
    ):
        other = predict(shape(), "q8", devices(), placement, more).memory
        assert all(new_.needs >= old.needs for new_, old in zip(other, one, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["0;1", "0&1"]))
def test_weights_are_given_out_once(first: int, second: int, placement: str) -> None:
    """All devices together have the model's matrices, and what each has a copy of besides."""
    plain = shape()
    spec = replace(plain, head=replace(plain.head, tied=False), tensors=plain.tensors | {"head": "head"})
    whole = predict(spec, "f32", devices(), "0", WORK).memory[0].weights
    parts = predict(spec, "f32", devices(), placement, WORK, split=f"{first}:{second}").memory
    norms = 4 * 256 * (2 * 4 + 1) if placement == "0&1" else 0
    assert sum(each.weights for each in parts) == whole + norms


def test_wrong_formats_and_workloads_are_named() -> None:
    with pytest.raises(LlmcError, match="unknown weight format q99"):
        predict(shape(), "q99", devices(), "0")
    with pytest.raises(LlmcError, match="no format for layers.0.q"):
        predict(shape(), {"embedding": "q8"}, devices(), "0")
    with pytest.raises(LlmcError, match="workload: queries 0; wanted at least 1"):
        Workload(queries=0)
    with pytest.raises(LlmcError, match="kv 'q5'"):
        predict(shape(), "q8", devices(), "0", kv="q5")
    assert Experts().count == 0


def test_long_prompts_are_counted_whole() -> None:
    placed = Placed(Model(shape(), "q8", "bf16"), devices(), parse_placement("0;1"))
    for tokens in (1, 512, 513, 512 * 64 + 1, 1_000_003):
        chunks = [segment for (segment,) in placed.chunks(Workload(tokens, 1, 1))]
        assert sum(segment.rows for segment in chunks) == tokens
        assert [segment.before for segment in chunks] == [sum(c.rows for c in chunks[:n]) for n in range(len(chunks))]
        assert [segment.logits for segment in chunks] == [0] * (len(chunks) - 1) + [1]
        assert len(chunks) <= 64
