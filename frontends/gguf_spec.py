"""GGUF metadata -> ModelSpec, by the tables below. Every fault is told at once.

Source: llama.cpp's src/llama-arch.cpp (key and tensor names), src/llama-model.cpp (defaults).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import (
    EOS_LIMIT,
    Attention,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    Position,
    Sizes,
    Tokens,
    range_fault,
)
from llmc.compiler.spec_fields import clip, near
from llmc.frontends.gguf_tokenizer import adds_bos_by_default
from llmc.frontends.model_name import clean_name

# general.architecture -> layout of rope. The converter permutes q and k of `llama` for this layout
# (llama.cpp: convert_hf_to_gguf.py, permute; src/llama-model.cpp, llama_model_rope_type).
ARCHITECTURES = {"llama": "interleaved"}

# Key after "<architecture>." -> field of the spec.
_NUMBERS = {
    "context_length": "sizes.context",
    "embedding_length": "sizes.hidden",
    "block_count": "sizes.layers",
    "feed_forward_length": "sizes.ffn",
    "attention.head_count": "attention.heads",
    "attention.head_count_kv": "attention.kv_heads",
    "attention.layer_norm_rms_epsilon": "norm.eps",
    "attention.key_length": "attention.head_dim",
    "attention.value_length": "attention.head_dim",
    "rope.freq_base": "position.theta",
    "attention.scale": "attention.scale",
    "vocab_size": "sizes.vocab",
}
_REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_ROTATED = "rope.dimension_count"  # how much of a head rope turns: all of it
# Keys that must have one of these values: any other changes the model in a way llmc does not know.
_ONLY: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),
}
DEFAULT_THETA = 10000.0

_LAYER = "blk.{layer}"
_TENSORS = {
    "embedding": "token_embd.weight",
    "layers.{layer}.attention_norm": f"{_LAYER}.attn_norm.weight",
    "layers.{layer}.q": f"{_LAYER}.attn_q.weight",
    "layers.{layer}.k": f"{_LAYER}.attn_k.weight",
    "layers.{layer}.v": f"{_LAYER}.attn_v.weight",
    "layers.{layer}.o": f"{_LAYER}.attn_output.weight",
    "layers.{layer}.mlp_norm": f"{_LAYER}.ffn_norm.weight",
    "layers.{layer}.gate": f"{_LAYER}.ffn_gate.weight",
    "layers.{layer}.up": f"{_LAYER}.ffn_up.weight",
    "layers.{layer}.down": f"{_LAYER}.ffn_down.weight",
    "final_norm": "output_norm.weight",
}
# Tensors that a file has or has not; the spec's flags follow from that.
_QKV_BIAS = {f"layers.{{layer}}.{x}_bias": f"{_LAYER}.attn_{x}.bias" for x in "qkv"}
_OUTPUT_BIAS = {"layers.{layer}.o_bias": f"{_LAYER}.attn_output.bias"}
_MLP_BIAS = {f"layers.{{layer}}.{x}_bias": f"{_LAYER}.ffn_{x}.bias" for x in ("gate", "up", "down")}
_HEAD = {"head": "output.weight"}

# Names in the file whose refusal deserves a reason.
TENSOR_NOTES = {"rope_freqs.weight": "rope_freqs scales rope, which llmc does not know yet"}

_GENERAL_ONLY = {"general.type": ("model",)}
_IGNORED_SPACES = ("general.", "quantize.imatrix.", "split.", "tokenizer.")


def derive_spec(metadata: dict[str, Any], tensors: Collection[str], stem: str) -> ModelSpec:
    """The spec of a GGUF file from its metadata and the names of its tensors.

    `stem` is its name if the metadata has none. Raises SourceError naming every key that is
    unknown, missing, refused or out of bounds.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise SourceError(f"general.architecture is {clip(kind)}, llmc knows: {', '.join(ARCHITECTURES)}")
    faults = _foreign_keys(metadata, kind)
    own = {key[len(kind) + 1 :]: v for key, v in metadata.items() if key.startswith(f"{kind}.")}
    faults += _only_faults(own, kind)
    numbers = _numbers(own, kind, metadata, faults)
    tokens = _tokens(metadata, numbers.get("sizes.vocab"), faults)
    if faults:
        raise SourceError("; ".join(faults))
    has = {name: first.replace("{layer}", "0") in tensors for name, first in _first_names().items()}
    optional = {"qkv": _QKV_BIAS, "output": _OUTPUT_BIAS, "mlp": _MLP_BIAS, "head": _HEAD}
    names = dict(_TENSORS)
    for name, table in optional.items():
        names |= table if has[name] else {}
    head_dim = numbers["attention.head_dim"]
    title = metadata.get("general.name")
    return ModelSpec(
        name=clean_name(title if isinstance(title, str) else stem),
        sizes=Sizes(**{path.split(".")[1]: n for path, n in numbers.items() if path.startswith("sizes.")}),
        norm=Norm("rms", numbers["norm.eps"]),
        attention=Attention(
            kind="gqa",
            heads=numbers["attention.heads"],
            kv_heads=numbers["attention.kv_heads"],
            head_dim=head_dim,
            scale=numbers.get("attention.scale", 1 / math.sqrt(head_dim)),
            bias=has["qkv"],
            output_bias=has["output"],
        ),
        position=Position("rope", numbers.get("position.theta", DEFAULT_THETA), ARCHITECTURES[kind]),
        mlp=Mlp("gated", "silu", has["mlp"]),
        head=Head(tied=not has["head"]),
        tokens=tokens,
        tensors=names,
    )


def _first_names() -> dict[str, str]:
    return {
        "qkv": next(iter(_QKV_BIAS.values())),
        "output": next(iter(_OUTPUT_BIAS.values())),
        "mlp": next(iter(_MLP_BIAS.values())),
        "head": _HEAD["head"],
    }


def _foreign_keys(metadata: dict[str, Any], kind: str) -> list[str]:
    faults = []
    unknown = [key for key in metadata if not key.startswith((f"{kind}.", *_IGNORED_SPACES))]
    if unknown:
        faults.append(f"unknown keys {', '.join(map(clip, unknown))}")
    for key, values in _GENERAL_ONLY.items():
        if key in metadata and metadata[key] not in values:
            faults.append(f"{key} = {clip(metadata[key])}, wanted {values[0]!r}")
    if metadata.get("split.count", 1) not in (0, 1):
        faults.append("the model is split over several files; join them with llama-gguf-split")
    return faults


def _only_faults(own: dict[str, Any], kind: str) -> list[str]:
    known = {*_NUMBERS, *_ONLY, _ROTATED}
    faults = []
    scaled = own.get("rope.scaling.type", "none") != "none"
    unknown = [key for key in own if key not in known]
    if unknown:
        shown = ", ".join(f"{kind}.{near(key, known)}" for key in unknown)
        faults.append(f"unknown keys {shown}: llmc does not guess what they do to the model")
    for key, values in _ONLY.items():
        value = own.get(key, values[0])
        if not any(value == wanted and type(value) is type(wanted) for wanted in values):
            faults.append(f"{kind}.{key} = {clip(value)}, llmc knows: {values[0]!r}")
    if scaled:
        faults.append("scaled rope is not supported yet")
    return faults


def _numbers(own: dict[str, Any], kind: str, metadata: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """Fields of the spec -> numbers within their bounds, derived ones filled in."""
    numbers: dict[str, Any] = {}
    faults += [f"missing key {kind}.{key}" for key in _REQUIRED if key not in own]
    for key, path in _NUMBERS.items():
        if key not in own:
            continue
        value = _uniform(own[key])
        fault = range_fault(path, value, f"{kind}.{key}")
        if fault:
            faults.append(fault)
        elif numbers.setdefault(path, value) != value:
            faults.append(f"{kind}.{key} = {clip(value)}, but {path} is {numbers[path]} elsewhere")
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    if isinstance(vocabulary, list) and vocabulary:
        if numbers.setdefault("sizes.vocab", len(vocabulary)) != len(vocabulary):
            faults.append(
                f"{kind}.vocab_size = {numbers['sizes.vocab']}, but the tokenizer has {len(vocabulary)} tokens"
            )
    elif "sizes.vocab" not in numbers:
        faults.append("missing key tokenizer.ggml.tokens")
    heads, hidden = numbers.get("attention.heads"), numbers.get("sizes.hidden")
    if heads and hidden:
        numbers.setdefault("attention.kv_heads", heads)
        if "attention.head_dim" not in numbers and hidden % heads:
            faults.append(f"embedding_length = {hidden} is no multiple of head_count = {heads}")
        if fault := range_fault("attention.head_dim", numbers.setdefault("attention.head_dim", hidden // heads)):
            faults.append(fault)
        head_dim = numbers["attention.head_dim"]
        if own.get(_ROTATED, head_dim) != head_dim:
            faults.append(f"{kind}.{_ROTATED} = {clip(own[_ROTATED])}, wanted head_dim = {head_dim}")
    return numbers


def _uniform(value: Any) -> Any:
    """The number that a per-layer list repeats; a list of different ones stays, to be refused."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _tokens(metadata: dict[str, Any], vocab: int | None, faults: list[str]) -> Tokens:
    """Ends of text: the end of text, of a turn, of a message (llama.cpp's special_eog_ids)."""
    ids = {}
    for key in ("bos", "eos", "eot", "eom"):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 0 <= value < (vocab or 1 << 24)):
            faults.append(f"tokenizer.ggml.{key}_token_id = {clip(value)}, wanted an id of a token")
        elif value is not None:
            ids[key] = value
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default(metadata))
    if not isinstance(add_bos, bool):
        faults.append(f"tokenizer.ggml.add_bos_token = {clip(add_bos)}, wanted a boolean")
    if add_bos is True and "bos" not in ids:
        faults.append("tokenizer.ggml.add_bos_token is set, but bos_token_id is not given")
    ends = dict.fromkeys(ids[key] for key in ("eos", "eot", "eom") if key in ids)
    return Tokens(ids.get("bos"), tuple(ends)[:EOS_LIMIT], add_bos is True)
