"""Which tensors a spec asks for, and their shapes: one table over the blocks' settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from llmc.compiler.spec.sources import ENCODER, parse

if TYPE_CHECKING:
    from llmc.compiler.spec import ModelSpec
    from llmc.compiler.spec.blocks import (
        Attention,
        Convolution,
        Embedding,
        Encoder,
        Experts,
        Head,
        Latent,
        Mlp,
        Norm,
        Position,
        Sizes,
        Wiring,
    )

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
    @property
    def latent(self) -> Latent: ...
    @property
    def encoder(self) -> Encoder | None: ...
    @property
    def convolution(self) -> Convolution | None: ...


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
        "layers.{layer}.cross_norm": _crossing(lambda b: b.norm.place in ("pre", "sandwich")),
        "layers.{layer}.cross_post_norm": _crossing(lambda b: b.norm.place in ("sandwich", "output", "sum")),
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


def _crossing(there: Condition = _always) -> Condition:
    return _both(lambda b: b.encoder is not None, there)


def _relative(per_layer: bool) -> Condition:
    return lambda b: b.position.kind == "relative" and b.position.per_layer == per_layer


def _gqa(there: Condition = _always) -> Condition:
    return _both(lambda b: b.attention.kind == "gqa", there)


def _mla(there: Condition = _always) -> Condition:
    return _both(lambda b: b.attention.kind == "mla", there)


def _experts(there: Condition = _always) -> Condition:
    return _both(lambda b: b.experts.count != 0, there)


# What only layers with experts have, and only the others. An expert's rows follow those of the expert before it.
EXPERTS: dict[str, tuple[tuple[str, ...], Condition]] = {
    "layers.{layer}.router": (("experts", "hidden"), _experts()),
    "layers.{layer}.router_bias": (("experts",), _experts(lambda b: b.experts.bias)),
    "layers.{layer}.router_product_bias": (("experts",), _experts(lambda b: b.experts.product_bias)),
    "layers.{layer}.experts.gate": (("experts_ffn", "hidden"), _experts()),
    "layers.{layer}.experts.up": (("experts_ffn", "hidden"), _experts()),
    "layers.{layer}.experts.down": (("experts_hidden", "expert_ffn"), _experts()),
    "layers.{layer}.experts.gate_bias": (("experts_ffn",), _experts(lambda b: b.experts.biases)),
    "layers.{layer}.experts.up_bias": (("experts_ffn",), _experts(lambda b: b.experts.biases)),
    "layers.{layer}.experts.down_bias": (("experts_hidden",), _experts(lambda b: b.experts.biases)),
    "layers.{layer}.shared.gate": (("shared_ffn", "hidden"), _experts(lambda b: b.experts.shared_ffn != 0)),
    "layers.{layer}.shared.up": (("shared_ffn", "hidden"), _experts(lambda b: b.experts.shared_ffn != 0)),
    "layers.{layer}.shared.down": (("hidden", "shared_ffn"), _experts(lambda b: b.experts.shared_ffn != 0)),
    "layers.{layer}.shared_gate": (("one", "hidden"), _experts(lambda b: b.experts.shared_gate)),
    "layers.{layer}.experts_norm": (("hidden",), _experts(lambda b: b.experts.norm)),
}
# What only layers with latent attention have. k_up makes queries for the latent: each head's matrix is turned.
LATENT: dict[str, tuple[tuple[str, ...], Condition]] = {
    "layers.{layer}.q_down": (("q_rank", "hidden"), _mla(lambda b: b.latent.q_rank != 0)),
    "layers.{layer}.q_down_bias": (("q_rank",), _mla(lambda b: b.latent.q_rank != 0 and b.attention.bias)),
    "layers.{layer}.q_down_norm": (("q_rank",), _mla(lambda b: b.latent.q_rank != 0)),
    "layers.{layer}.q_plain": (("heads_plain", "q_source"), _mla()),
    "layers.{layer}.q_rope": (("heads_rope", "q_source"), _mla()),
    "layers.{layer}.kv_down": (("kv_rank", "hidden"), _mla()),
    "layers.{layer}.kv_down_bias": (("kv_rank",), _mla(lambda b: b.attention.bias)),
    "layers.{layer}.kv_down_norm": (("kv_rank",), _mla()),
    "layers.{layer}.k_rope": (("rope", "hidden"), _mla()),
    "layers.{layer}.k_rope_bias": (("rope",), _mla(lambda b: b.attention.bias)),
    "layers.{layer}.k_up": (("heads_rank", "plain"), _mla()),
    "layers.{layer}.v_up": (("mixed", "kv_rank"), _mla()),
}
# What layers with a convolution have in place of what others have of attention.
CONVOLUTION: dict[str, tuple[tuple[str, ...], Condition]] = {
    "layers.{layer}.conv_in": (("conv_in", "hidden"), lambda b: b.convolution is not None),
    "layers.{layer}.conv": (("conv", "hidden"), lambda b: b.convolution is not None),
    "layers.{layer}.conv_out": (("hidden", "hidden"), lambda b: b.convolution is not None),
}
PLAIN_MLP = {
    f"layers.{{layer}}.{name}" for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
}  # fmt: skip

# What layers with attention have for it.
ATTENTION: dict[str, tuple[tuple[str, ...], Condition]] = {
    "layers.{layer}.q": (("q", "hidden"), _gqa()),
    "layers.{layer}.k": (("kv", "hidden"), _gqa()),
    "layers.{layer}.v": (("kv", "hidden"), _gqa()),
    "layers.{layer}.q_bias": (("q",), _gqa(lambda b: b.attention.bias)),
    "layers.{layer}.k_bias": (("kv",), _gqa(lambda b: b.attention.bias)),
    "layers.{layer}.v_bias": (("kv",), _gqa(lambda b: b.attention.bias)),
    "layers.{layer}.q_norm": (("q_norm",), _both(_qk_norm("head", "heads", "all"), lambda b: b.norm.weight != "none")),
    "layers.{layer}.k_norm": (("k_norm",), _both(_qk_norm("head", "heads", "all"), lambda b: b.norm.weight != "none")),
    "layers.{layer}.q_norm_bias": (("q_norm",), lambda b: b.attention.qk_norm_bias),
    "layers.{layer}.k_norm_bias": (("k_norm",), lambda b: b.attention.qk_norm_bias),
    "layers.{layer}.sinks": (("heads",), lambda b: b.attention.sinks),
    "layers.{layer}.attention_gate": (("gates", "hidden"), lambda b: b.attention.gate != "none"),
    **LATENT,
    "layers.{layer}.o": (("hidden", "mixed"), _always),
    "layers.{layer}.o_bias": (("hidden",), lambda b: b.attention.output_bias),
    "layers.{layer}.relative_bias": (("buckets", "heads"), _relative(per_layer=True)),
}

_DECODER: dict[str, tuple[tuple[str, ...], Condition]] = {
    "embedding": (("vocab", "embedding"), _always),
    "positions": (("context", "hidden"), lambda b: b.position.kind == "learned"),
    "relative_bias": (("buckets", "heads"), _relative(per_layer=False)),
    "embedding_bias": (("hidden",), lambda b: b.embedding.bias),
    "project_in": (("hidden", "embedding"), lambda b: b.embedding.width != 0),
    "project_out": (("embedding", "hidden"), lambda b: b.embedding.width != 0),
    **ATTENTION,
    **CONVOLUTION,
    "layers.{layer}.cross_q": (("q", "hidden"), _crossing()),
    "layers.{layer}.cross_k": (("kv", "hidden"), _crossing()),
    "layers.{layer}.cross_v": (("kv", "hidden"), _crossing()),
    "layers.{layer}.cross_o": (("hidden", "q"), _crossing()),
    "layers.{layer}.cross_q_bias": (("q",), _crossing(lambda b: b.attention.bias)),
    "layers.{layer}.cross_k_bias": (("kv",), _crossing(lambda b: b.attention.bias)),
    "layers.{layer}.cross_v_bias": (("kv",), _crossing(lambda b: b.attention.bias)),
    "layers.{layer}.cross_o_bias": (("hidden",), _crossing(lambda b: b.attention.output_bias)),
    "layers.{layer}.gate": (("ffn", "hidden"), lambda b: b.mlp.kind == "gated"),
    "layers.{layer}.up": (("ffn", "hidden"), _always),
    "layers.{layer}.down": (("hidden", "ffn"), _always),
    "layers.{layer}.gate_bias": (("ffn",), lambda b: b.mlp.kind == "gated" and b.mlp.bias),
    "layers.{layer}.up_bias": (("ffn",), lambda b: b.mlp.bias),
    "layers.{layer}.down_bias": (("hidden",), lambda b: b.mlp.bias),
    "layers.{layer}.xielu_above": (("one",), lambda b: b.mlp.activation == "xielu"),
    "layers.{layer}.xielu_below": (("one",), lambda b: b.mlp.activation == "xielu"),
    **EXPERTS,
    **_norms(),
    "head_transform": (("hidden", "hidden"), lambda b: b.head.transform),
    "head_transform_bias": (("hidden",), lambda b: b.head.transform and b.head.transform_bias),
    "head": (("vocab", "embedding"), lambda b: not b.head.tied),
    "head_bias": (("vocab",), lambda b: b.head.bias),
}


_NOT_IN_ENCODER = ("head", "project_", "embedding_bias")


def _encoder() -> dict[str, tuple[tuple[str, ...], Condition]]:
    """An encoder's tensors: those of a model without its head, experts and cross-attention."""
    rows = {}
    for name, (letters, there) in _DECODER.items():
        if (
            name not in EXPERTS | LATENT | CONVOLUTION
            and ".cross_" not in name
            and not name.startswith(_NOT_IN_ENCODER)
        ):
            own = (lambda b: b.encoder.own_embedding) if name == "embedding" else there
            rows[ENCODER + name] = tuple(f"encoder_{x}" if x == "ffn" else x for x in letters), _crossing(own)
    return rows


# Our name -> the letters of its shape (see `dimensions`), and when a model has it.
TABLE = _DECODER | _encoder()


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
    encoder, latent = spec.encoder, spec.latent
    return {
        "vocab": sizes.vocab,
        "hidden": sizes.hidden,
        "embedding": spec.embedding.width or sizes.hidden,
        "context": sizes.context,
        "ffn": sizes.ffn,
        "encoder_ffn": encoder.ffn if encoder else 0,
        "heads": attention.heads,
        "buckets": spec.position.buckets,
        "q": q,
        "kv": kv,
        "mixed": attention.heads * latent.value_dim if attention.kind == "mla" else q,
        "q_rank": latent.q_rank,
        "q_source": latent.q_rank or sizes.hidden,
        "kv_rank": latent.kv_rank,
        "plain": latent.plain_dim,
        "rope": latent.rope_dim,
        "heads_plain": attention.heads * latent.plain_dim,
        "heads_rope": attention.heads * latent.rope_dim,
        "heads_rank": attention.heads * latent.kv_rank,
        "q_norm": attention.head_dim if shared else q,
        "k_norm": attention.head_dim if shared else kv,
        "gates": q if attention.gate == "each" else attention.heads,
        "one": 1,
        "conv_in": 3 * sizes.hidden,
        "conv": spec.convolution.size if spec.convolution else 0,
        "experts": spec.experts.count,
        "expert_ffn": spec.experts.ffn,
        "experts_ffn": spec.experts.count * spec.experts.ffn,
        "experts_hidden": spec.experts.count * sizes.hidden,
        "shared_ffn": spec.experts.shared_ffn,
    }


def required_tensors(blocks: Blocks) -> list[str]:
    """Our names, with "{layer}", of exactly the tensors a model of these blocks has."""
    nowhere: set[str] = set()
    if len(blocks.experts.layers) == blocks.sizes.layers:
        nowhere |= PLAIN_MLP
    if len(_convolved(blocks)) == blocks.sizes.layers:
        nowhere |= set(ATTENTION)
    return [name for name, (_, wanted) in TABLE.items() if wanted(blocks) and name not in nowhere]


def _convolved(blocks: Blocks) -> tuple[int, ...]:
    """Layers with a convolution."""
    return blocks.convolution.layers if blocks.convolution else ()


def in_layer(name: str, layer: int, blocks: Blocks) -> bool:
    """Whether one of `required_tensors` that are per layer is in this one."""
    if layer == 0 and blocks.norm.first_plain and name.endswith((".attention_norm", ".attention_norm_bias")):
        return False
    if name in (ATTENTION if layer in _convolved(blocks) else CONVOLUTION):
        return False
    return name not in (PLAIN_MLP if layer in blocks.experts.layers else EXPERTS)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Our expanded name ("layers.3.q") -> shape, in model order, of all the spec asks for."""
    sizes = dimensions(spec)
    wanted = {name: tuple(sizes[letter] for letter in TABLE[name][0]) for name in required_tensors(spec)}
    shapes = {"embedding": wanted.pop("embedding")}
    for encoder, layers in ((True, encoder_layers(spec)), (False, spec.sizes.layers)):
        part = {name: shape for name, shape in wanted.items() if name.startswith(ENCODER) == encoder}
        per_layer = {name: shape for name, shape in part.items() if "{layer}" in name}
        for layer in range(layers):
            for name, shape in per_layer.items():
                if in_layer(name, layer, spec):
                    shapes[name.replace("{layer}", str(layer))] = shape
        shapes |= {name: shape for name, shape in part.items() if name not in per_layer}
    return shapes


def encoder_layers(spec: ModelSpec) -> int:
    """Layers of the encoder; 0 where there is none."""
    return spec.encoder.layers if spec.encoder else 0


def cached_heads(spec: ModelSpec) -> tuple[int, int]:
    """KV heads in a layer's pages, and the numbers of one; of latent attention, latent and rotated key are one."""
    if spec.attention.kind == "mla":
        return 1, spec.latent.kv_rank + spec.latent.rope_dim
    return spec.attention.kv_heads, spec.attention.head_dim


def page_numbers(spec: ModelSpec) -> int:
    """How many numbers of a token the pages of one layer keep: its keys and values."""
    heads, size = cached_heads(spec)
    return 2 * heads * size


def weight_count(spec: ModelSpec) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(shape) for shape in tensor_shapes(spec).values())


def expand(spec: ModelSpec) -> dict[str, str]:
    """Our expanded name -> the name of the file's tensor it lies in, in model order."""
    file_names: dict[str, str] = {}
    for ours, theirs in ((ours, parse(text).name) for ours, text in spec.tensors.items()):
        count = encoder_layers(spec) if ours.startswith(ENCODER) else spec.sizes.layers
        for layer in range(count) if "{layer}" in ours else [0]:
            name = ours.replace("{layer}", str(layer))
            file_names[name] = theirs.replace("{layer}", str(layer))
    return {name: file_names[name] for name in tensor_shapes(spec)}
