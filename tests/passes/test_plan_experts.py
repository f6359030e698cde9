"""Where experts go: against all placements of tiny cases, and files that are not understood."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.errors import LlmcError
from llmc.passes.plan.experts import (
    Costs,
    Routing,
    check_routing,
    costs_of,
    of_trace,
    place_experts,
    rate,
    read_routing,
    seconds,
)
from llmc.passes.plan.held import Model

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import TWO, devices, shape
from test_partition_models import STRUCTURES

ACROSS = (
    TWO.replace("[[node]]", "[[node]]\ncount = 2").replace("count = 2\nmemory", "count = 1\nmemory")
    + """
[between]
latency_us = 10
gb_s = 1
"""
)


def _random(seed: int, layers: int, experts: int) -> Routing:
    rng = np.random.default_rng(seed)
    moves = rng.gamma(0.3, 10.0, (layers - 1, experts, experts))
    return Routing(rng.gamma(1.0, 10.0, (layers, experts)), moves)


def _every(experts: int, devices: int) -> list[tuple[int, ...]]:
    """All ways to give each device as many experts as the others."""
    each = experts // devices
    return [
        of
        for of in itertools.product(range(devices), repeat=experts)
        if all(of.count(d) == each for d in range(devices))
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("layers", "experts", "count"), [(2, 4, 2), (3, 4, 2), (2, 6, 2), (2, 6, 3)])
def test_near_the_best_of_all(seed: int, layers: int, experts: int, count: int) -> None:
    routing = _random(seed, layers, experts)
    costs = Costs(np.full(count, 1e-3), 2e-3 * (1 - np.eye(count)))
    found = place_experts(routing, costs, devices(TWO.replace("count = 2", f"count = {count}")))
    ways = [np.array(each) for each in itertools.product(_every(experts, count), repeat=layers)]
    least = min(seconds(of, routing, costs) for of in ways)
    assert found.best.seconds <= 1.1 * least
    assert found.best.seconds >= least * (1 - 1e-9)
    assert found.best.seconds <= min(found.in_order.seconds, found.in_turn.seconds)


def test_a_placement_by_hand() -> None:
    routing = Routing(np.array([[3.0, 1.0], [2.0, 2.0]]), np.array([[[2.0, 1.0], [0.0, 1.0]]]))
    costs = Costs(np.array([1.0, 1.0]), np.array([[0.0, 10.0], [10.0, 0.0]]))
    found = rate(np.array([[0, 1], [0, 1]]), routing, costs, np.array([0, 1]))
    assert found.seconds == 3 + 2 + 10 * 1 / 2
    assert found.crossing == 1 / 4
    assert found.imbalance == (3 / 2 + 2 / 2) / 2


def test_each_device_has_its_number_of_experts() -> None:
    routing = _random(0, 5, 11)
    costs = Costs(np.full(4, 1e-3), 1e-3 * (1 - np.eye(4)))
    found = place_experts(routing, costs, devices(TWO.replace("count = 2", "count = 4")))
    for row in found.best.of:
        assert sorted(np.bincount(row, minlength=4)) == [2, 3, 3, 3]


def test_what_follows_one_another_is_put_together() -> None:
    """Texts of two subjects, each with experts of its own that lie scattered: nothing needs to cross."""
    rng = np.random.default_rng(1)
    subject = rng.integers(0, 2, 4000)
    mixed = [rng.permutation(8) for _ in range(4)]
    trace = np.stack([order[subject * 4 + rng.integers(0, 4, 4000)] for order in mixed], axis=1)[:, :, None]
    train, held_out = of_trace(trace[:2000].astype(float), 8), of_trace(trace[2000:].astype(float), 8)
    found = devices(ACROSS)
    model = Model(STRUCTURES["experts"], "f32", "f32")
    placed = place_experts(train, costs_of(model, found), found)
    assert placed.best.crossing == 0
    nodes, costs = np.array([0, 1]), costs_of(model, found)
    own, order = (rate(each.of, held_out, costs, nodes) for each in (placed.best, placed.in_order))
    assert own.seconds < order.seconds
    assert order.crossing > 0.3


def test_a_trace_is_counted() -> None:
    routing = of_trace(np.array([[[0, 1], [2, 0]], [[1, 2], [0, 2]]], float))
    assert routing.loads.tolist() == [[1, 2, 1], [2, 0, 2]]
    assert routing.moves.sum() == 4  # as many as there are places of experts in a layer
    assert routing.moves[0, 1].tolist() == [1, 0, 1]


def test_files_of_all_kinds_say_the_same(tmp_path: Path) -> None:
    trace = np.random.default_rng(0).integers(0, 4, (20, 3, 2))
    routing = of_trace(trace.astype(float))
    (tmp_path / "a.json").write_text(json.dumps({"trace": trace.tolist()}))
    np.savez(tmp_path / "b.npz", trace=trace)
    np.savez(tmp_path / "c.npz", loads=routing.loads, moves=routing.moves)
    for name in ("a.json", "b.npz", "c.npz"):
        found = read_routing(tmp_path / name)
        np.testing.assert_array_equal(found.loads, routing.loads)
        np.testing.assert_array_equal(found.moves, routing.moves)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "wanted an object"),
        ("{}", "wanted `trace`, or `loads` and `moves`, got nothing"),
        ('{"trac": []}', "unknown key trac"),
        ('{"loads": [[1, 2]]}', "go together"),
        ('{"trace": [[1, 2], [3]]}', "rows of one length"),
        ('{"trace": [[1, 2]]}', r"shape \(1, 2\): wanted 3 dimensions"),
        ('{"trace": [[[-1]]]}', "at least 0"),
        ('{"loads": [[1, 2], [3, 4]], "moves": [[[1]]]}', r"moves is of shape \(1, 1, 1\), wanted \(1, 2, 2\)"),
    ],
)
def test_bad_files_are_named(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(LlmcError, match=reason):
        read_routing(tmp_path / "r.json")


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.npz").write_bytes(b"no archive")
    with pytest.raises(LlmcError, match=r"r\.npz: no \.npz file"):
        read_routing(tmp_path / "r.npz")
    with pytest.raises(LlmcError, match="cannot be read: no such file"):
        read_routing(tmp_path / "none.npz")


def test_a_routing_of_another_model_is_named() -> None:
    spec: Any = STRUCTURES["experts"]
    with pytest.raises(LlmcError, match="of 3 layers and 5 experts; the model has 5 experts in 2 layers"):
        check_routing(_random(0, 3, 5), spec)
    with pytest.raises(LlmcError, match="no experts"):
        check_routing(_random(0, 2, 5), shape())
    assert check_routing(_random(0, 2, 3), spec).moves.shape == (1, 5, 5)
    with pytest.raises(LlmcError, match="6 devices cannot share 5 experts"):
        place_experts(
            _random(0, 2, 5), Costs(np.ones(6), np.ones((6, 6))), devices(TWO.replace("count = 2", "count = 6"))
        )
    assert math.isfinite(costs_of(Model(spec, "f32", "f32"), devices()).token_s.sum())
