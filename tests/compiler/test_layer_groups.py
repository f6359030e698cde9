"""Which layers share a page table."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from convolved import convolved

from llmc.compiler.spec import LayerGroup, ModelSpec, Window, example, layer_groups, pool_layers, pools_of


def _windowed(*layers: int) -> ModelSpec:
    spec = example()
    return replace(spec, sizes=replace(spec.sizes, layers=4), window=Window(size=16, layers=layers, theta=1e4))


def test_layers_that_see_everything_come_first() -> None:
    assert layer_groups(example()) == (LayerGroup((0, 1), 0),)
    assert layer_groups(_windowed(0, 1, 3)) == (LayerGroup((2,), 0), LayerGroup((0, 1, 3), 16))


def test_windows_everywhere_are_one_group() -> None:
    assert layer_groups(_windowed(0, 1, 2, 3)) == (LayerGroup((0, 1, 2, 3), 16),)


def test_what_an_encoder_reads_is_seen_whole() -> None:
    spec = _windowed(0, 1)
    encoder = replace(spec, attention=replace(spec.attention, causal=False))
    assert layer_groups(encoder) == (LayerGroup((0, 1, 2, 3), 0),)


def test_convolutions_are_a_group_with_as_many_tensors_of_pages_as_they_want() -> None:
    """Of 64 channels pages of one kv head of 16 keep 32: two tensors each, the second ones behind all layers."""
    spec = convolved(0, 2)
    assert layer_groups(spec) == (LayerGroup((1,), 0), LayerGroup((0, 2, 3, 4), 3))
    assert pool_layers(spec) == 5
    assert [pools_of(spec, layer) for layer in range(3)] == [(0, 3), (1,), (2, 4)]


def test_pages_that_keep_all_channels_of_a_convolution() -> None:
    spec = convolved(0, 2, kv_heads=2)
    assert pool_layers(spec) == 3
    assert layer_groups(spec) == (LayerGroup((1,), 0), LayerGroup((0, 2), 3))


def test_convolutions_everywhere_are_one_group() -> None:
    assert layer_groups(convolved(0, 1, 2, kv_heads=2)) == (LayerGroup((0, 1, 2), 3),)


def test_windows_beside_convolutions() -> None:
    spec = replace(convolved(0), window=Window(size=16, layers=(2,), theta=1e4))
    assert layer_groups(spec) == (LayerGroup((1,), 0), LayerGroup((2,), 16), LayerGroup((0, 3), 3))
