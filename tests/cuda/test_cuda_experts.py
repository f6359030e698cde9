"""CUDA kernels of experts against their NumPy meanings, as test_cuda_kernels.py has the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.formats import FORMATS
from llmc.compiler.spec import CHOICES
from llmc.targets.cuda import experts as kernels

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
from expert_cases import experts, route
from kernel_cases import Case
from test_cuda_kernels import call, check, cut


def row_of(case: Case, row: int) -> Case:
    """The case with one of its rows."""
    return replace(
        case, arrays=[a[row : row + 1].copy() if i in case.symbolic else a for i, a in enumerate(case.arrays)]
    )


# The way out reads weights as the way in does: one format of each kind.
OUT = ("f32", "bf16", "q8", "q4", "c3h", "q4_k", "mxfp4")


@pytest.mark.parametrize(("name", "way"), [*((name, "in") for name in FORMATS), *((name, "out") for name in OUT)])
def test_experts_of_every_format(name: str, way: str) -> None:
    """Of several rows, and of one alone, which takes another kernel: the same bits."""
    rng = np.random.default_rng([len(name), len(way)])
    for kind in ["packed", *(["bf16"] if name == "bf16" else [])]:
        case = cut(experts(rng, f"{kind}_experts_{way}", name))
        (several,) = check(case)
        (alone,) = check(row_of(case, 3))
        np.testing.assert_array_equal(alone[0], several[3])


@pytest.mark.parametrize("way", ["in", "out"])
def test_rows_in_more_than_one_block(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pairs of an expert in a block, and a last block that is not full: what blocks hold does not change a bit."""
    case = experts(np.random.default_rng(3), f"packed_experts_{way}", "q4", rows=13)
    (whole,) = check(case)
    for name in ("FOUND", "SORTED"):
        monkeypatch.setattr(kernels, name, 16)
    (parts,) = check(case)
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_matrix_of_more_than_2_31_numbers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WIDE", 1)
    check(cut(experts(np.random.default_rng(4), f"packed_experts_{way}", "q8")))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("routing", CHOICES["experts.routing"])
def test_every_routing(routing: str, groups: int) -> None:
    rng = np.random.default_rng([groups, *map(ord, routing)])
    for count in (16, 80):
        attrs = {"groups": groups, "groups_used": max(1, groups - 1), "used": 3, "renormalize": groups % 2}
        logits, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, count), (count,)))
        check(Case("route", [logits, bias], route(rng, routing=routing, **attrs).attrs, (0,)))


ROUTED = {"used": 3, "renormalize": 1, "scale": 1.0, "groups": 1, "groups_used": 1, "tolerance": 0.1}


def test_equal_scores_go_to_the_first_experts() -> None:
    logits = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    ids, _ = check(Case("route", [logits, np.zeros(6, np.float32)], {**ROUTED, "routing": "softmax"}, (0,)))
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("routing", ["softmax", "sparse_mixer"])
def test_ids_are_those_of_experts_also_without_any_number(routing: str) -> None:
    """A model that went wrong must not read outside of its weights."""
    logits, attrs = np.full((2, 6), np.nan, np.float32), {**ROUTED, "routing": routing, "groups": 2}
    case = Case("route", [logits, np.zeros(6, np.float32)], attrs, (0,))
    like = [np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)]
    ids, _ = call(case, like)
    assert ((ids >= 0) & (ids < 6)).all()
