"""What does not hold together in a spec: numbers out of bounds, unknown choices, settings against one another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llmc.compiler.spec.blocks import Experts, Latent
from llmc.compiler.spec.fields import clip, near
from llmc.compiler.spec.limits import CHOICES, LIMITS, SWITCHES
from llmc.compiler.spec.sources import source_faults
from llmc.compiler.spec.tensors import required_tensors

if TYPE_CHECKING:
    from llmc.compiler.spec.model_spec import ModelSpec

NAME_LIMIT = 200  # characters in a model's name
EOS_LIMIT = 64  # ids that end a text
SPANS_LIMIT = 1 << 16  # original contexts in a text whose queries grow by their number
TILE = 16  # rows of a matrix that lie together in memory, of one expert


def spec_faults(spec: ModelSpec) -> list[str]:
    """Every fault of a spec; relations are looked at only where each value by itself is in order."""
    faults = [*_range_faults(spec), *_choice_faults(spec)]
    return faults or [*_relation_faults(spec), *_token_faults(spec), *_tensor_faults(spec)]


def _value(spec: ModelSpec, path: str) -> Any:
    block, field = path.split(".")
    return getattr(getattr(spec, block), field)


def _has(spec: ModelSpec, path: str) -> bool:
    return getattr(spec, path.split(".")[0]) is not None


def range_fault(path: str, value: Any, label: str | None = None) -> str | None:
    """What is wrong with number `value` of field `path` ("sizes.vocab"), or None.

    `label` is what its file calls it.
    """
    low, high = LIMITS[path]
    whole = isinstance(low, int)
    number = isinstance(value, int) if whole else isinstance(value, (int, float))
    off = path in SWITCHES and value == 0
    # A NaN fails every comparison, so it is refused here too.
    if number and not isinstance(value, bool) and (off or low <= value <= high):
        return None
    kind = "a whole number" if whole else "a number"
    return f"{label or path} = {clip(value)}, wanted {kind} from {low} to {high}{', or 0' if path in SWITCHES else ''}"


def _range_faults(spec: ModelSpec) -> list[str]:
    return [fault for path in LIMITS if _has(spec, path) and (fault := range_fault(path, _value(spec, path)))]


def _choice_faults(spec: ModelSpec) -> list[str]:
    return [
        f"{path} = {clip(_value(spec, path))}, llmc knows: {', '.join(known)}"
        for path, known in CHOICES.items()
        if _has(spec, path) and _value(spec, path) not in known
    ]


def _relation_faults(spec: ModelSpec) -> list[str]:
    faults = []
    attention = spec.attention
    if attention.heads % attention.kv_heads:
        faults.append(f"attention.heads = {attention.heads} is no multiple of kv_heads = {attention.kv_heads}")
    if spec.position.kind == "rope":
        faults += _rope_faults(spec)
    elif spec.scaling:
        faults.append(f"scaling is for rope, but position.kind is {spec.position.kind}")
    if spec.window and not spec.window.layers:
        faults.append("window.layers has no layer; leave window out")
    for path, layers in (
        ("window.layers", spec.window.layers if spec.window else ()),
        ("position.plain_layers", spec.position.plain_layers),
        ("experts.layers", spec.experts.layers),
        ("convolution.layers", spec.convolution.layers if spec.convolution else ()),
    ):
        ascending = all(a < b for a, b in zip(layers, layers[1:], strict=False))
        if layers and (not ascending or layers[0] < 0 or layers[-1] >= spec.sizes.layers):
            faults.append(f"{path} = {clip(layers)}, wanted indices from 0 to {spec.sizes.layers - 1}, ascending")
    faults += [*_head_faults(spec), *_heads_and_mlp_faults(spec), *_latent_faults(spec), *_expert_faults(spec)]
    faults += [*_position_faults(spec), *_encoder_faults(spec), *_convolution_faults(spec)]
    if spec.norm.weight == "none" and spec.norm.bias:
        faults.append("norm.bias is true, but norm.weight is none")
    if spec.wiring.order != "sequential" and spec.norm.place != "pre":
        faults.append(f"wiring.order = {spec.wiring.order} needs norm.place = pre, got {spec.norm.place}")
    if not 1 <= len(spec.name) <= NAME_LIMIT or not spec.name.isprintable():
        faults.append(f"name = {clip(spec.name)}, wanted 1 to {NAME_LIMIT} printable characters")
    return faults


def _head_faults(spec: ModelSpec) -> list[str]:
    head, pooling = spec.head, spec.pooling
    faults = []
    if (head.kind == "hidden") != (pooling is not None):
        faults.append("head.kind = hidden and a table [pooling] go together")
    if pooling and spec.attention.causal and pooling.kind != "last":
        faults.append(f"pooling.kind = {pooling.kind} needs attention.causal = false")
    if pooling and pooling.tokens > spec.sizes.context:
        faults.append(f"pooling.tokens = {pooling.tokens}, wanted at most sizes.context = {spec.sizes.context}")
    if head.kind == "hidden" and (not head.tied or head.transform or head.bias):
        faults.append("head.kind = hidden has no weights: wanted tied = true, transform and bias = false")
    return faults


def _heads_and_mlp_faults(spec: ModelSpec) -> list[str]:
    attention, mlp = spec.attention, spec.mlp
    faults = []
    if attention.qk_norm == "none" and (attention.qk_norm_bias or attention.qk_norm_place != "before_rope"):
        faults.append("attention.qk_norm = none has neither qk_norm_bias nor qk_norm_place")
    if attention.sinks and spec.position.kind == "relative":
        faults.append("attention.sinks is not for position.kind = relative")
    if mlp.activation == "xielu" and (mlp.kind != "plain" or spec.head.transform or spec.encoder):
        faults.append("mlp.activation = xielu is for mlp.kind = plain, without head.transform and without encoder")
    if (mlp.limit or mlp.plus_one) and mlp.kind != "gated":
        faults.append("mlp.limit and plus_one need mlp.kind = gated")
    if mlp.plus_one and not mlp.limit:
        faults.append("mlp.plus_one needs a limit")
    if spec.experts.norm and (spec.norm.bias or spec.norm.weight == "none"):
        faults.append("experts.norm needs norms with a weight and without bias")
    if spec.norm.first_plain and spec.norm.place not in ("pre", "sandwich"):
        faults.append(f"norm.first_plain needs norm.place = pre or sandwich, got {spec.norm.place}")
    return faults


def _expert_faults(spec: ModelSpec) -> list[str]:
    experts = spec.experts
    if not experts.count:
        return [] if experts == Experts() else ["experts.count = 0 means no experts, but more of experts is given"]
    faults = []
    if not experts.layers:
        faults.append("experts.layers has no layer; leave experts out")
    if not 1 <= experts.used <= experts.count:
        faults.append(f"experts.used = {experts.used}, wanted 1 to experts.count = {experts.count}")
    for path, size in (("experts.ffn", experts.ffn), ("sizes.hidden", spec.sizes.hidden)):
        if not size or size % TILE:
            faults.append(f"{path} = {size}, wanted a multiple of {TILE} for experts")
    if experts.count % experts.groups or experts.groups_used > experts.groups:
        faults.append(
            f"experts.groups = {experts.groups}, groups_used = {experts.groups_used}, wanted a divisor of "
            f"experts.count = {experts.count}, and no more used than there are"
        )
    elif experts.used > experts.count // experts.groups * experts.groups_used:
        faults.append(f"experts.used = {experts.used}, more than {experts.groups_used} groups have")
    if spec.mlp.kind != "gated" or spec.mlp.bias:
        faults.append("experts need mlp.kind = gated and mlp.bias = false")
    if experts.shared_gate and not experts.shared_ffn:
        faults.append("experts.shared_gate is true, but experts.shared_ffn is 0")
    if (experts.routing == "sparse_mixer") != (experts.tolerance > 0):
        faults.append("experts.routing = sparse_mixer and a tolerance above 0 go together")
    if experts.routing == "sparse_mixer" and (experts.groups > 1 or experts.bias or experts.scale != 1):
        faults.append("experts.routing = sparse_mixer needs groups = 1, bias = false and scale = 1")
    return faults


def _latent_faults(spec: ModelSpec) -> list[str]:
    """What attention.kind = mla needs and cannot have; nothing of latent may be given for other kinds."""
    latent, attention = spec.latent, spec.attention
    if attention.kind != "mla":
        return [] if latent == Latent() else [f"attention.kind = {attention.kind}, but a table [latent] is given"]
    faults = [
        f"latent.{name} = {size}, wanted a multiple of {TILE}"
        for name in ("kv_rank", "plain_dim", "value_dim")
        if (size := getattr(latent, name)) == 0 or size % TILE
    ]
    if not latent.rope_dim or latent.rope_dim % 2:
        faults.append(f"latent.rope_dim = {latent.rope_dim}, wanted an even number above 0")
    if attention.head_dim != latent.plain_dim + latent.rope_dim:
        faults.append(f"attention.head_dim = {attention.head_dim}, wanted latent.plain_dim + rope_dim")
    if attention.kv_heads != attention.heads:
        faults.append(f"attention.kv_heads = {attention.kv_heads}, wanted attention.heads, as mla has no groups")
    off = {
        "attention.qk_norm": attention.qk_norm != "none",
        "attention.gate": attention.gate != "none",
        "attention.clip": attention.clip,
        "position.rotary_dim": spec.position.rotary_dim,
    }
    faults += [f"{path} is not for attention.kind = mla" for path, given in off.items() if given]
    if spec.position.kind not in ("rope", "none", "learned"):
        faults.append(f"position.kind = {spec.position.kind} is not for attention.kind = mla")
    return faults


def _position_faults(spec: ModelSpec) -> list[str]:
    position, hidden = spec.position, spec.sizes.hidden
    faults = []
    if position.kind == "sinusoidal" and hidden % 2:
        faults.append(f"sizes.hidden = {hidden}, wanted an even number for position.kind = sinusoidal")
    if position.kind == "relative" and (position.buckets % 4 or position.distance <= position.buckets // 2):
        faults.append(
            f"position.buckets = {position.buckets}, distance = {position.distance}, wanted a multiple of 4 above 0, "
            "and a distance of more than half as much"
        )
    if position.kind == "relative" and spec.attention.sinks:
        faults.append("position.kind = relative needs attention.sinks = false")
    return faults


def _encoder_faults(spec: ModelSpec) -> list[str]:
    """What an encoder that is built like the rest of the model cannot have."""
    if spec.encoder is None:
        return []
    off = {
        "experts.count": spec.experts.count,
        "embedding.width": spec.embedding.width,
        "embedding.bias": spec.embedding.bias,
        "head.transform": spec.head.transform,
        "norm.first_plain": spec.norm.first_plain,
        "attention.soft_cap": spec.attention.soft_cap,
        "attention.clip": spec.attention.clip,
        "position.plain_layers": spec.position.plain_layers,
        "window": spec.window is not None,
    }
    faults = [f"{path} is not for models with an encoder" for path, value in off.items() if value]
    needed = {"attention.causal": True, "attention.kind": "gqa", "wiring.order": "sequential", "head.kind": "logits"}
    for path, value in needed.items():
        if _value(spec, path) != value:
            faults.append(f"{path} = {_value(spec, path)}, wanted {value} in a model with an encoder")
    return faults


def _convolution_faults(spec: ModelSpec) -> list[str]:
    """What short convolutions, which keep their sums' parts where attention keeps keys and values, cannot have."""
    if spec.convolution is None:
        return []
    faults = [
        f"{path} = {_value(spec, path)}, wanted a multiple of {TILE} for convolutions"
        for path in ("sizes.hidden", "attention.head_dim")
        if _value(spec, path) % TILE
    ]
    if not spec.convolution.layers:
        faults.append("convolution.layers has no layer; leave convolution out")
    off = {
        "attention.kind = mla": spec.attention.kind == "mla",
        "pooling": spec.pooling is not None,
        "encoder": spec.encoder is not None,
        "norm.first_plain": spec.norm.first_plain,
    }
    faults += [f"{path} is not for models with convolutions" for path, given in off.items() if given]
    if spec.window and (both := sorted({*spec.window.layers} & {*spec.convolution.layers})):
        faults.append(f"layers {clip(both)} are of window and of convolution")
    if not spec.attention.causal:
        faults.append("attention.causal = false is not for models with convolutions")
    return faults


def _rope_faults(spec: ModelSpec) -> list[str]:
    size = spec.latent.rope_dim or spec.attention.head_dim
    rotated = spec.position.rotary_dim or size
    faults = []
    if rotated % 2 or rotated > size:
        name = "position.rotary_dim" if spec.position.rotary_dim else "attention.head_dim"
        faults.append(f"{name} = {rotated}, wanted an even number up to {size} for rope")
    scaling = spec.scaling
    if scaling and scaling.kind == "longrope":
        for name, factors in (("short", scaling.short), ("long", scaling.long)):
            if len(factors) != rotated // 2 or not all(0 < factor < math.inf for factor in factors):
                faults.append(f"scaling.{name} = {clip(factors)}, wanted {rotated // 2} numbers above 0")
    if scaling and scaling.queries and spec.sizes.context // scaling.original_context > SPANS_LIMIT:
        faults.append(
            f"sizes.context = {spec.sizes.context} is more than {SPANS_LIMIT} times scaling.original_context, "
            "too many for scaling.queries"
        )
    if scaling and scaling.kind != "longrope" and (scaling.short or scaling.long):
        faults.append(f"scaling.short and scaling.long are for longrope, not for {scaling.kind}")
    return faults


def _token_faults(spec: ModelSpec) -> list[str]:
    tokens, vocab = spec.tokens, spec.sizes.vocab
    ids = [("tokens.bos", tokens.bos)] if tokens.bos is not None else []
    ids += [("tokens.end", tokens.end)] if tokens.end is not None else []
    ids += [("tokens.start", tokens.start)] if tokens.start is not None else []
    ids += [("tokens.eos", token) for token in tokens.eos]
    ids += [("tokens.forced", token) for token in tokens.forced]
    ids += [("tokens.suppressed", token) for token in tokens.suppressed]
    faults = [
        f"{where} = {clip(token)}, wanted an id from 0 to {vocab - 1}"
        for where, token in ids
        if isinstance(token, bool) or not 0 <= token < vocab
    ]
    if len(tokens.eos) > EOS_LIMIT or len(set(tokens.eos)) != len(tokens.eos):
        faults.append(f"tokens.eos has {len(tokens.eos)} ids, wanted at most {EOS_LIMIT}, each once")
    for name, listed in (("forced", tokens.forced), ("suppressed", tokens.suppressed)):
        if len(listed) > EOS_LIMIT:
            faults.append(f"tokens.{name} has {len(listed)} ids, wanted at most {EOS_LIMIT}")
        if listed and spec.encoder is None:
            faults.append(f"tokens.{name} is for models with a table [encoder] only")
    if (tokens.start is None) != (spec.encoder is None):
        faults.append("tokens.start and a table [encoder] go together")
    if tokens.add_bos and tokens.bos is None:
        faults.append("tokens.add_bos is true but tokens.bos is not given")
    return faults


def _tensor_faults(spec: ModelSpec) -> list[str]:
    wanted = required_tensors(spec)
    missing = [name for name in wanted if name not in spec.tensors]
    extra = [name for name in spec.tensors if name not in wanted]
    faults = []
    if missing:
        faults.append(f"tensors lacks {', '.join(missing)}")
    if extra:
        faults.append("tensors has unused " + ", ".join(near(name, wanted) for name in extra))
    return faults + source_faults(spec.tensors)
