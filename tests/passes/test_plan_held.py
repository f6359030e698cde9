"""What the planner takes each device to have is what the partition pass gives it: weights, heads, collectives."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import parse_placement
from llmc.frontends.graph.build import build
from llmc.passes.partition import partition
from llmc.passes.plan.held import Held, Model

sys.path.insert(0, str(Path(__file__).parent))
from test_partition_models import BY_LAYER, OTHERS, PROMISED, STRUCTURES


def _held_numbers(model: Model, held: Held) -> int:
    layers = sum(count * sum(tensor.numbers for tensor in model.tensors(kind, held.cut)) for kind, count in held.layers)
    return layers + sum(tensor.numbers for tensor in held.outer)


def _same(structure: str, devices: str, split: str | None = None) -> None:
    spec, placement = STRUCTURES[structure], parse_placement(devices, split)
    model = Model(spec, "f32", "f32")
    for part, held in zip(partition(build(spec, "f32"), placement), model.held(placement), strict=True):
        assert {kv for kv in part.kv_heads} == {held.kv_heads}
        pages = sum(count * kind.pools for kind, count in held.layers if not kind.encoder)
        assert len(part.layers) == max(pages, sum(count for kind, count in held.layers if kind.encoder))
        assert _held_numbers(model, held) == sum(math.prod(share.shape) for share in part.weights), part.rank


@pytest.mark.parametrize("devices", ["0&1", "0;1;2;3", "0&1;2&3"])
@pytest.mark.parametrize("structure", PROMISED)
def test_shares_of_what_is_promised(structure: str, devices: str) -> None:
    _same(structure, devices)


@pytest.mark.parametrize("structure", OTHERS)
def test_shares_of_what_is_built_differently(structure: str) -> None:
    _same(structure, "0&1;2&3")


@pytest.mark.parametrize("structure", BY_LAYER)
def test_stages_of_what_is_divided_by_layer_only(structure: str) -> None:
    _same(structure, "0;1;2;3")
    _same(structure, "0;1", "3:1")
    with pytest.raises(LlmcError, match="convolutions are not shared by devices"):
        Model(STRUCTURES[structure], "f32", "f32").held(parse_placement("0&1", None))


@pytest.mark.parametrize(("devices", "split"), [("0&1", "3:1"), ("0;1", "3:1"), ("0&1;2", "1:2:1")])
def test_unequal_shares(devices: str, split: str) -> None:
    _same("grouped queries", devices, split)
