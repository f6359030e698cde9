"""Which tensors a spec asks for, and their shapes: one table over the blocks' settings."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.compiler.spec import ModelSpec

Condition = tuple[str, Any]  # (a field of the spec as "block.field", the value it must have)

_QKV_BIAS: Condition = ("attention.bias", True)
_MLP_BIAS: Condition = ("mlp.bias", True)
_QK_NORM: Condition = ("attention.qk_norm", "head")
_SANDWICH: Condition = ("norm.place", "sandwich")

# Our name -> the letters of its shape (see `dimensions`), and when a model has it (None: always).
TABLE: dict[str, tuple[tuple[str, ...], Condition | None]] = {
    "embedding": (("vocab", "hidden"), None),
    "layers.{layer}.attention_norm": (("hidden",), None),
    "layers.{layer}.q": (("q", "hidden"), None),
    "layers.{layer}.k": (("kv", "hidden"), None),
    "layers.{layer}.v": (("kv", "hidden"), None),
    "layers.{layer}.q_bias": (("q",), _QKV_BIAS),
    "layers.{layer}.k_bias": (("kv",), _QKV_BIAS),
    "layers.{layer}.v_bias": (("kv",), _QKV_BIAS),
    "layers.{layer}.q_norm": (("head_dim",), _QK_NORM),
    "layers.{layer}.k_norm": (("head_dim",), _QK_NORM),
    "layers.{layer}.o": (("hidden", "q"), None),
    "layers.{layer}.o_bias": (("hidden",), ("attention.output_bias", True)),
    "layers.{layer}.attention_post_norm": (("hidden",), _SANDWICH),
    "layers.{layer}.mlp_norm": (("hidden",), None),
    "layers.{layer}.gate": (("ffn", "hidden"), None),
    "layers.{layer}.up": (("ffn", "hidden"), None),
    "layers.{layer}.down": (("hidden", "ffn"), None),
    "layers.{layer}.gate_bias": (("ffn",), _MLP_BIAS),
    "layers.{layer}.up_bias": (("ffn",), _MLP_BIAS),
    "layers.{layer}.down_bias": (("hidden",), _MLP_BIAS),
    "layers.{layer}.mlp_post_norm": (("hidden",), _SANDWICH),
    "final_norm": (("hidden",), None),
    "head": (("vocab", "hidden"), ("head.tied", False)),
}


def is_norm(name: str) -> bool:
    """Whether one of our names is the weight of a norm."""
    return name.endswith("norm")


def dimensions(spec: ModelSpec) -> dict[str, int]:
    """The sizes that shapes are made of; q is heads x head_dim, kv is kv_heads x head_dim."""
    attention = spec.attention
    return {
        "vocab": spec.sizes.vocab,
        "hidden": spec.sizes.hidden,
        "ffn": spec.sizes.ffn,
        "head_dim": attention.head_dim,
        "q": attention.heads * attention.head_dim,
        "kv": attention.kv_heads * attention.head_dim,
    }


def names_wanted(value_of: Callable[[str], Any]) -> list[str]:
    """Our names, with "{layer}", of exactly the tensors of a model whose fields are `value_of("block.field")`."""
    return [name for name, (_, wanted) in TABLE.items() if wanted is None or value_of(wanted[0]) == wanted[1]]


def required_tensors(spec: ModelSpec) -> list[str]:
    """Our names, with "{layer}", of exactly the tensors a model of this spec has."""
    return names_wanted(lambda path: operator.attrgetter(path)(spec))


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


def weight_count(spec: ModelSpec) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(shape) for shape in tensor_shapes(spec).values())


def expand(spec: ModelSpec) -> dict[str, str]:
    """Our expanded name -> the file's name, in model order."""
    file_names: dict[str, str] = {}
    for ours, theirs in spec.tensors.items():
        for layer in range(spec.sizes.layers) if "{layer}" in ours else [0]:
            name = ours.replace("{layer}", str(layer))
            file_names[name] = theirs.replace("{layer}", str(layer))
    return {name: file_names[name] for name in tensor_shapes(spec)}
