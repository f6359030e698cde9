"""Which layers share a page table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.compiler.spec.tensors import pool_layers

if TYPE_CHECKING:
    from llmc.compiler.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one page table; where `window` is not 0, a row sees that many tokens of a text in them, the last."""

    layers: tuple[int, ...]
    window: int


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """All layers of the page pool: those that see everything, then those with a window, where there are any.

    A text that an encoder reads goes in whole and leaves whole: its layers are one group, whatever they see.
    """
    every = tuple(range(pool_layers(spec)))
    if spec.window is None or not spec.attention.causal:
        return (LayerGroup(every, 0),)
    far = tuple(layer for layer in every if layer not in spec.window.layers)
    near = LayerGroup(spec.window.layers, spec.window.size)
    return (LayerGroup(far, 0), near) if far else (near,)
