"""Which layers share a page table."""

from __future__ import annotations

from dataclasses import replace

from llmc.compiler.spec import LayerGroup, ModelSpec, Window, example, layer_groups


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
