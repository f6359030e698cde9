"""A spec of three layers of which some have a convolution."""

from __future__ import annotations

from dataclasses import replace

from llmc.compiler.spec import Attention, Convolution, ModelSpec, example

NAMES = {f"layers.{{layer}}.{name}": f"layers.{{layer}}.{name}" for name in ("conv_in", "conv_out")}
TAPS = {"layers.{layer}.conv": "layers.{layer}.conv | squeezed | transposed"}


def convolved(*layers: int, kv_heads: int = 1) -> ModelSpec:
    """64 channels, heads of 16, three tokens."""
    spec = example()
    attending = "qkvo" if len(layers) < 3 else ""
    own = {name: text for name, text in spec.tensors.items() if name[-1] not in "qkvo" or name[-1] in attending}
    return replace(
        spec,
        sizes=replace(spec.sizes, hidden=64, layers=3),
        attention=Attention("gqa", heads=4, kv_heads=kv_heads, head_dim=16, scale=0.25),
        convolution=Convolution(3, layers),
        tensors=own | NAMES | TAPS,
    )
