"""Which layers share a page table, and which tensors of pages each layer has.

A layer has the tensor of pages of its own number. A convolution may keep as much of a token as would be the keys and
values of several layers: it has more of them then, behind those of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.compiler.spec.tensors import encoder_layers, page_numbers

if TYPE_CHECKING:
    from llmc.compiler.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one page table; where `window` is not 0, a row sees that many tokens of a text in them, the last."""

    layers: tuple[int, ...]
    window: int


def _more(spec: ModelSpec) -> int:
    """Tensors of pages that a layer with a convolution has beside its own."""
    return -(-spec.sizes.hidden // page_numbers(spec)) - 1


def pool_layers(spec: ModelSpec) -> int:
    """Tensors of pages: an encoder's keys and values lie in pages of the same shape."""
    more = _more(spec) * len(spec.convolution.layers) if spec.convolution else 0
    return max(encoder_layers(spec), spec.sizes.layers) + more


def pools_of(spec: ModelSpec, layer: int) -> tuple[int, ...]:
    """The tensors of pages that a layer has."""
    if spec.convolution is None or layer not in spec.convolution.layers:
        return (layer,)
    more = _more(spec)
    first = spec.sizes.layers + spec.convolution.layers.index(layer) * more
    return layer, *range(first, first + more)


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """All layers of the page pool: those that see everything, then those that see a few tokens, where there are any.

    A text that an encoder reads goes in whole and leaves whole: its layers are one group, whatever they see.
    """
    near: list[LayerGroup] = []
    if spec.window is not None and spec.attention.causal:
        near.append(LayerGroup(spec.window.layers, spec.window.size))
    if spec.convolution is not None:
        pools = sorted(pool for layer in spec.convolution.layers for pool in pools_of(spec, layer))
        near.append(LayerGroup(tuple(pools), spec.convolution.size))
    far = set(range(pool_layers(spec))).difference(*(group.layers for group in near))
    return (*([LayerGroup(tuple(sorted(far)), 0)] if far else []), *near)
