"""Every kernel of experts against its NumPy meaning, for every kind of CPU this machine can run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.meaning import experts as meaning
from llmc.compiler.spec import CHOICES
from llmc.targets.matrices.experts import ROW_BLOCK

sys.path.insert(0, str(Path(__file__).parent))
from expert_cases import BLOCK_FORMATS, EXPERT_CASES, experts, route
from kernel_cases import FEW_FORMATS, TURNS, Case, fixed, result, run, run_rows
from test_kernels import DISTINCT, VARIANTS, WIDTHS


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("op", EXPERT_CASES)
def test_kernel_equals_its_meaning(op: str, variant: str) -> None:
    rng = np.random.default_rng([*map(ord, op + variant)])
    for _ in range(3 if variant == "native" else 1):
        run_rows(EXPERT_CASES[op](rng), VARIANTS[variant])


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.thorough_if(case=lambda format, way: format not in FEW_FORMATS or way != ("in", "out")[TURNS[format]])
def test_every_block_format_equals_its_meaning(format: str, way: str) -> None:
    rng = np.random.default_rng([*map(ord, format)])
    run(fixed(experts(rng, f"i8_experts_{way}", format, rows=3)), VARIANTS["native"])


@pytest.mark.parametrize("op", ["i8_experts_in", "i8_experts_out", "bf16_experts_in", "packed_experts_out"])
def test_more_rows_than_are_sorted_at_once(op: str) -> None:
    rng = np.random.default_rng([*map(ord, op)])
    format = {"i8": "q4", "bf16": "bf16", "packed": "q8"}[op.split("_")[0]]
    run_rows(experts(rng, op, format, rows=ROW_BLOCK + 30, inner=64), VARIANTS["native"])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("routing", CHOICES["experts.routing"])
def test_every_routing_equals_its_meaning(routing: str, groups: int) -> None:
    rng = np.random.default_rng([groups, *map(ord, routing)])
    for renormalize in (0, 1):
        attrs = {"groups": groups, "groups_used": max(1, groups - 1), "used": 3, "renormalize": renormalize}
        logits, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 16), (16,)))
        case = route(rng, routing=routing, **attrs)
        run(Case("route", [logits, bias], case.attrs, (0,)), VARIANTS["native"])


@pytest.mark.parametrize("variant", WIDTHS)
def test_equal_scores_go_to_the_first_experts(variant: str) -> None:
    logits = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    attrs = {
        "used": 3, "routing": "softmax", "renormalize": 1, "scale": 1.0, "groups": 1, "groups_used": 1,
        "tolerance": 0.0,
    }  # fmt: skip
    run(Case("route", [logits, np.zeros(6, np.float32)], attrs, (0,)), VARIANTS[variant])
    assert meaning.route(logits, np.zeros(6, np.float32), **attrs)[0].tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("routing", ["softmax", "sparse_mixer"])
def test_ids_are_those_of_experts_also_without_any_number(routing: str) -> None:
    """A model that went wrong must not read outside of its weights."""
    logits = np.full((2, 6), np.nan, np.float32)
    attrs = {
        "used": 3, "routing": routing, "renormalize": 0, "scale": 1.0, "groups": 2, "groups_used": 1, "tolerance": 0.1,
    }  # fmt: skip
    like = (np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
    case = Case("route", [logits, np.zeros(6, np.float32)], attrs, (0,))
    ids, _ = result(case, VARIANTS["native"], like)
    assert ((ids >= 0) & (ids < 6)).all()


def test_routing_by_hand() -> None:
    """Sigmoid scores, a bias for choosing only, the better of two groups by its best two, weights of sum 2."""
    logits = np.log(np.array([[4, 1, 3, 2]], np.float32) / np.array([[1, 4, 2, 3]], np.float32))  # .8 .2 .6 .4
    bias = np.array([0, 0, 0, 0.1], np.float32)
    ids, weights = meaning.route(logits, bias, 2, "sigmoid", 1, 2.0, 2, 1, 0.0)
    assert ids.tolist() == [[2, 3]]  # .6 + .5 above .8 + .2
    np.testing.assert_allclose(weights, [[1.2, 0.8]], rtol=1e-6)
