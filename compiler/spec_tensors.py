"""Which tensors a spec asks for, and their shapes: one table over the blocks' settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.spec import ModelSpec

Wanted = Callable[["ModelSpec"], bool]


def _always(_: ModelSpec) -> bool:
    return True


def _qkv_bias(spec: ModelSpec) -> bool:
    return spec.attention.bias


def _output_bias(spec: ModelSpec) -> bool:
    return spec.attention.output_bias


def _mlp_bias(spec: ModelSpec) -> bool:
    return spec.mlp.bias


def _own_head(spec: ModelSpec) -> bool:
    return not spec.head.tied


# Our name -> the letters of its shape (see `dimensions`), and when a model has it.
TABLE: dict[str, tuple[tuple[str, ...], Wanted]] = {
    "embedding": (("vocab", "hidden"), _always),
    "layers.{layer}.attention_norm": (("hidden",), _always),
    "layers.{layer}.q": (("q", "hidden"), _always),
    "layers.{layer}.k": (("kv", "hidden"), _always),
    "layers.{layer}.v": (("kv", "hidden"), _always),
    "layers.{layer}.q_bias": (("q",), _qkv_bias),
    "layers.{layer}.k_bias": (("kv",), _qkv_bias),
    "layers.{layer}.v_bias": (("kv",), _qkv_bias),
    "layers.{layer}.o": (("hidden", "q"), _always),
    "layers.{layer}.o_bias": (("hidden",), _output_bias),
    "layers.{layer}.mlp_norm": (("hidden",), _always),
    "layers.{layer}.gate": (("ffn", "hidden"), _always),
    "layers.{layer}.up": (("ffn", "hidden"), _always),
    "layers.{layer}.down": (("hidden", "ffn"), _always),
    "layers.{layer}.gate_bias": (("ffn",), _mlp_bias),
    "layers.{layer}.up_bias": (("ffn",), _mlp_bias),
    "layers.{layer}.down_bias": (("hidden",), _mlp_bias),
    "final_norm": (("hidden",), _always),
    "head": (("vocab", "hidden"), _own_head),
}


def dimensions(spec: ModelSpec) -> dict[str, int]:
    """The sizes that shapes are made of; q is heads x head_dim, kv is kv_heads x head_dim."""
    attention = spec.attention
    return {
        "vocab": spec.sizes.vocab,
        "hidden": spec.sizes.hidden,
        "ffn": spec.sizes.ffn,
        "q": attention.heads * attention.head_dim,
        "kv": attention.kv_heads * attention.head_dim,
    }


def required_tensors(spec: ModelSpec) -> list[str]:
    """Our names, with "{layer}", of exactly the tensors a model of this spec has."""
    return [name for name, (_, wanted) in TABLE.items() if wanted(spec)]


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Our expanded name ("layers.3.q") -> shape, in model order, of all the spec asks for."""
    sizes = dimensions(spec)
    per_layer: dict[str, tuple[int, ...]] = {}
    outer: dict[str, tuple[int, ...]] = {}
    for name in required_tensors(spec):
        shape = tuple(sizes[letter] for letter in TABLE[name][0])
        (per_layer if "{layer}" in name else outer)[name] = shape
    shapes = {"embedding": outer.pop("embedding")}
    for layer in range(spec.sizes.layers):
        for name, shape in per_layer.items():
            shapes[name.replace("{layer}", str(layer))] = shape
    return shapes | outer


def expand(spec: ModelSpec) -> dict[str, str]:
    """Our expanded name -> the file's name, in model order."""
    file_names: dict[str, str] = {}
    for ours, theirs in spec.tensors.items():
        for layer in range(spec.sizes.layers) if "{layer}" in ours else [0]:
            name = ours.replace("{layer}", str(layer))
            file_names[name] = theirs.replace("{layer}", str(layer))
    return {name: file_names[name] for name in tensor_shapes(spec)}
