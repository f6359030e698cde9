"""Which tensors a spec asks for, and their shapes: one table over the blocks' settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from llmc.compiler.spec.sources import parse

if TYPE_CHECKING:
    from llmc.compiler.spec import ModelSpec
    from llmc.compiler.spec.blocks import Attention, Embedding, Experts, Head, Mlp, Norm, Position, Sizes, Wiring

Condition = Callable[["Blocks"], bool]


class Blocks(Protocol):
    """The blocks of a spec that decide which tensors there are."""

    @property
    def sizes(self) -> Sizes: ...
    @property
    def norm(self) -> Norm: ...
    @property
    def attention(self) -> Attention: ...
    @property
    def position(self) -> Position: ...
    @property
    def mlp(self) -> Mlp: ...
    @property
    def wiring(self) -> Wiring: ...
    @property
    def embedding(self) -> Embedding: ...
    @property
    def head(self) -> Head: ...
    @property
    def experts(self) -> Experts: ...


def _always(_: Blocks) -> bool:
    return True


def _qk_norm(*kinds: str) -> Condition:
    return lambda b: b.attention.qk_norm in kinds


def _norms() -> dict[str, tuple[tuple[str, ...], Condition]]:
    """Every norm but those of q and k, and its bias."""
    when: dict[str, Condition] = {
        "embedding_norm": lambda b: b.norm.embedding,
        "layers.{layer}.attention_norm": lambda b: b.norm.place in ("pre", "sandwich"),
        "layers.{layer}.attention_post_norm": lambda b: b.norm.place in ("sandwich", "output", "sum"),
        "layers.{layer}.mlp_norm": lambda b: b.norm.place in ("pre", "sandwich") and b.wiring.order != "shared",
        "layers.{layer}.mlp_post_norm": lambda b: b.norm.place in ("sandwich", "output", "sum"),
        "final_norm": lambda b: b.norm.final,
        "head_norm": lambda b: b.head.transform,
    }
    rows: dict[str, tuple[tuple[str, ...], Condition]] = {}
    for name, there in when.items():
        rows[name] = ("hidden",), _both(there, lambda b: b.norm.weight != "none")
        rows[f"{name}_bias"] = ("hidden",), _both(there, lambda b: b.norm.bias)
    return rows


def _both(first: Condition, second: Condition) -> Condition:
    return lambda b: first(b) and second(b)


def _experts(there: Condition = _always) -> Condition:
    return _both(lambda b: b.experts.count != 0, there)


# What only layers with experts have, and only the others. An expert's rows follow those of the expert before it.
EXPERTS: dict[str, tuple[tuple[str, ...], Condition]] = {
    "layers.{layer}.router": (("experts", "hidden"), _experts()),
    "layers.{layer}.router_bias": (("experts",), _experts(lambda b: b.experts.bias)),
    "layers.{layer}.experts.gate": (("experts_ffn", "hidden"), _experts()),
    "layers.{layer}.experts.up": (("experts_ffn", "hidden"), _experts()),
    "layers.{layer}.experts.down": (("experts_hidden", "expert_ffn"), _experts()),
    "layers.{layer}.shared.gate": (("shared_ffn", "hidden"), _experts(lambda b: b.experts.shared_ffn != 0)),
    "layers.{layer}.shared.up": (("shared_ffn", "hidden"), _experts(lambda b: b.experts.shared_ffn != 0)),
    "layers.{layer}.shared.down": (("hidden", "shared_ffn"), _experts(lambda b: b.experts.shared_ffn != 0)),
    "layers.{layer}.shared_gate": (("one", "hidden"), _experts(lambda b: b.experts.shared_gate)),
}
PLAIN_MLP = {
    f"layers.{{layer}}.{name}" for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
}  # fmt: skip

# Our name -> the letters of its shape (see `dimensions`), and when a model has it.
TABLE: dict[str, tuple[tuple[str, ...], Condition]] = {
    "embedding": (("vocab", "embedding"), _always),
    "positions": (("context", "hidden"), lambda b: b.position.kind == "learned"),
    "embedding_bias": (("hidden",), lambda b: b.embedding.bias),
    "project_in": (("hidden", "embedding"), lambda b: b.embedding.width != 0),
    "project_out": (("embedding", "hidden"), lambda b: b.embedding.width != 0),
    "layers.{layer}.q": (("q", "hidden"), _always),
    "layers.{layer}.k": (("kv", "hidden"), _always),
    "layers.{layer}.v": (("kv", "hidden"), _always),
    "layers.{layer}.q_bias": (("q",), lambda b: b.attention.bias),
    "layers.{layer}.k_bias": (("kv",), lambda b: b.attention.bias),
    "layers.{layer}.v_bias": (("kv",), lambda b: b.attention.bias),
    "layers.{layer}.q_norm": (("q_norm",), _qk_norm("head", "heads", "all")),
    "layers.{layer}.k_norm": (("k_norm",), _qk_norm("head", "heads", "all")),
    "layers.{layer}.o": (("hidden", "q"), _always),
    "layers.{layer}.o_bias": (("hidden",), lambda b: b.attention.output_bias),
    "layers.{layer}.gate": (("ffn", "hidden"), lambda b: b.mlp.kind == "gated"),
    "layers.{layer}.up": (("ffn", "hidden"), _always),
    "layers.{layer}.down": (("hidden", "ffn"), _always),
    "layers.{layer}.gate_bias": (("ffn",), lambda b: b.mlp.kind == "gated" and b.mlp.bias),
    "layers.{layer}.up_bias": (("ffn",), lambda b: b.mlp.bias),
    "layers.{layer}.down_bias": (("hidden",), lambda b: b.mlp.bias),
    **EXPERTS,
    **_norms(),
    "head_transform": (("hidden", "hidden"), lambda b: b.head.transform),
    "head_transform_bias": (("hidden",), lambda b: b.head.transform),
    "head": (("vocab", "embedding"), lambda b: not b.head.tied),
    "head_bias": (("vocab",), lambda b: b.head.bias),
}


def is_norm(name: str) -> bool:
    """Whether one of our names is the weight of a norm."""
    return name.endswith("norm")


def is_stacked(name: str) -> bool:
    """Whether one of our expanded names is that of the matrices of all experts of a layer, one under another."""
    return ".experts." in name


def is_router(name: str) -> bool:
    """Whether one of our names is that of a matrix that decides where tokens go: rounding it would send them astray."""
    return name.endswith((".router", ".shared_gate"))


def dimensions(spec: ModelSpec) -> dict[str, int]:
    """The sizes that shapes are made of; q is heads x head_dim, kv is kv_heads x head_dim."""
    attention, sizes = spec.attention, spec.sizes
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shared = attention.qk_norm == "head"
    return {
        "vocab": sizes.vocab,
        "hidden": sizes.hidden,
        "embedding": spec.embedding.width or sizes.hidden,
        "context": sizes.context,
        "ffn": sizes.ffn,
        "q": q,
        "kv": kv,
        "q_norm": attention.head_dim if shared else q,
        "k_norm": attention.head_dim if shared else kv,
        "one": 1,
        "experts": spec.experts.count,
        "expert_ffn": spec.experts.ffn,
        "experts_ffn": spec.experts.count * spec.experts.ffn,
        "experts_hidden": spec.experts.count * sizes.hidden,
        "shared_ffn": spec.experts.shared_ffn,
    }


def required_tensors(blocks: Blocks) -> list[str]:
    """Our names, with "{layer}", of exactly the tensors a model of these blocks has."""
    no_plain_mlp = len(blocks.experts.layers) == blocks.sizes.layers
    return [name for name, (_, wanted) in TABLE.items() if wanted(blocks) and not (no_plain_mlp and name in PLAIN_MLP)]


def in_layer(name: str, layer: int, blocks: Blocks) -> bool:
    """Whether one of `required_tensors` that are per layer is in this one."""
    return name not in (PLAIN_MLP if layer in blocks.experts.layers else EXPERTS)


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
            if in_layer(name, layer, spec):
                shapes[name.replace("{layer}", str(layer))] = shape
    return shapes | outer


def weight_count(spec: ModelSpec) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(shape) for shape in tensor_shapes(spec).values())


def expand(spec: ModelSpec) -> dict[str, str]:
    """Our expanded name -> the name of the file's tensor it lies in, in model order."""
    file_names: dict[str, str] = {}
    for ours, theirs in ((ours, parse(text).name) for ours, text in spec.tensors.items()):
        for layer in range(spec.sizes.layers) if "{layer}" in ours else [0]:
            name = ours.replace("{layer}", str(layer))
            file_names[name] = theirs.replace("{layer}", str(layer))
    return {name: file_names[name] for name in tensor_shapes(spec)}
