"""ModelSpec: a model as data. It picks a kind for each block and names every tensor.

It never names a model family. On disk a spec is TOML (`to_toml`, `from_toml`), in the artifact's
manifest it is JSON (`to_dict`, `from_dict`). Reading is strict: unknown keys, missing keys and
values out of bounds are one error that lists them all.

>>> spec = example()
>>> from_toml(to_toml(spec)) == spec
True
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from llmc.compiler.errors import SpecError
from llmc.compiler.spec_blocks import (
    CHOICES,
    LIMITS,
    SWITCHES,
    Attention,
    Embedding,
    Experts,
    Head,
    Mlp,
    Norm,
    Pooling,
    Position,
    Scaling,
    Sizes,
    Tokens,
    Window,
    Wiring,
)
from llmc.compiler.spec_fields import clip, near, read_dataclass, table_of, write_toml
from llmc.compiler.spec_sources import source_faults
from llmc.compiler.spec_tensors import expand, required_tensors, tensor_shapes, weight_count
from llmc.compiler.text_file import parse_toml

__all__ = [
    "BLOCKS",
    "CHOICES",
    "LIMITS",
    "OPTIONAL_BLOCKS",
    "Attention",
    "Embedding",
    "Experts",
    "Head",
    "Mlp",
    "ModelSpec",
    "Norm",
    "Pooling",
    "Position",
    "Scaling",
    "Sizes",
    "Tokens",
    "Window",
    "Wiring",
    "example",
    "expand",
    "from_dict",
    "from_toml",
    "tensor_shapes",
    "to_dict",
    "to_toml",
    "weight_count",
]

NAME_LIMIT = 200  # characters in a model's name
EOS_LIMIT = 64  # ids that end a text
TOML_LIMIT = 1 << 20  # characters of a spec file
TILE = 16  # rows of a matrix that lie together in memory, of one expert


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a model except the numbers in its weights.

    `tensors` maps our names to the file's names, both with "{layer}" where a tensor exists per
    layer. All linear weights are (out, in). Raises SpecError, naming every fault, when it does not
    hold together.
    """

    name: str
    sizes: Sizes
    norm: Norm
    attention: Attention
    position: Position
    mlp: Mlp
    head: Head
    tokens: Tokens
    tensors: dict[str, str]
    embedding: Embedding = Embedding()
    window: Window | None = None  # none: every layer sees the whole text
    scaling: Scaling | None = None
    wiring: Wiring = Wiring()
    pooling: Pooling | None = None
    experts: Experts = Experts()

    def __post_init__(self) -> None:
        faults = [*_range_faults(self), *_choice_faults(self)]
        faults = faults or [*_relation_faults(self), *_token_faults(self), *_tensor_faults(self)]
        if faults:
            raise SpecError(f"spec of {clip(self.name)}: " + "; ".join(faults))


def _blocks(optional: bool) -> dict[str, type]:
    hints = {name: hint for name, hint in get_type_hints(ModelSpec).items() if table_of(hint) not in (None, Tokens)}
    return {name: kind for name, hint in hints.items() if (kind := table_of(hint)) and (kind is not hint) == optional}


# Field -> class: of the blocks that every model has, and of those that one may lack.
BLOCKS, OPTIONAL_BLOCKS = _blocks(optional=False), _blocks(optional=True)


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
    ):
        ascending = all(a < b for a, b in zip(layers, layers[1:], strict=False))
        if layers and (not ascending or layers[0] < 0 or layers[-1] >= spec.sizes.layers):
            faults.append(f"{path} = {clip(layers)}, wanted indices from 0 to {spec.sizes.layers - 1}, ascending")
    faults += [*_head_faults(spec), *_expert_faults(spec)]
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
    if head.kind == "hidden" and (not head.tied or head.transform or head.bias):
        faults.append("head.kind = hidden has no weights: wanted tied = true, transform and bias = false")
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
    return faults


def _rope_faults(spec: ModelSpec) -> list[str]:
    rotated, size = spec.position.rotary_dim or spec.attention.head_dim, spec.attention.head_dim
    faults = []
    if rotated % 2 or rotated > size:
        name = "position.rotary_dim" if spec.position.rotary_dim else "attention.head_dim"
        faults.append(f"{name} = {rotated}, wanted an even number up to {size} for rope")
    scaling = spec.scaling
    if scaling and scaling.kind == "longrope":
        for name, factors in (("short", scaling.short), ("long", scaling.long)):
            if len(factors) != rotated // 2 or not all(0 < factor < math.inf for factor in factors):
                faults.append(f"scaling.{name} = {clip(factors)}, wanted {rotated // 2} numbers above 0")
    if scaling and scaling.kind != "longrope" and (scaling.short or scaling.long):
        faults.append(f"scaling.short and scaling.long are for longrope, not for {scaling.kind}")
    return faults


def _token_faults(spec: ModelSpec) -> list[str]:
    tokens, vocab = spec.tokens, spec.sizes.vocab
    ids = [("tokens.bos", tokens.bos)] if tokens.bos is not None else []
    ids += [("tokens.end", tokens.end)] if tokens.end is not None else []
    ids += [("tokens.eos", token) for token in tokens.eos]
    faults = [
        f"{where} = {clip(token)}, wanted an id from 0 to {vocab - 1}"
        for where, token in ids
        if isinstance(token, bool) or not 0 <= token < vocab
    ]
    if len(tokens.eos) > EOS_LIMIT or len(set(tokens.eos)) != len(tokens.eos):
        faults.append(f"tokens.eos has {len(tokens.eos)} ids, wanted at most {EOS_LIMIT}, each once")
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


def to_dict(spec: ModelSpec) -> dict[str, Any]:
    """The spec as plain JSON values, the same for equal specs."""
    plain = asdict(spec)
    for table in plain.values():
        if isinstance(table, dict):
            table |= {key: list(value) for key, value in table.items() if isinstance(value, tuple)}
    return plain


def from_dict(plain: Any) -> ModelSpec:
    """The spec of `to_dict`. Raises SpecError naming every unknown, missing or mistyped key."""
    faults: list[str] = []
    spec = read_dataclass(ModelSpec, plain, "", faults, globals())
    if faults or not isinstance(spec, ModelSpec):
        raise SpecError("spec: " + "; ".join(faults))
    return spec


def to_toml(spec: ModelSpec) -> str:
    """The spec as TOML text that `from_toml` reads back to an equal spec."""
    return write_toml(to_dict(spec))


def from_toml(text: str) -> ModelSpec:
    """The spec in a TOML text. Raises SpecError with the line, or naming every bad key."""
    return from_dict(parse_toml(text, "spec", TOML_LIMIT, SpecError))


def example() -> ModelSpec:
    """A tiny Llama-like spec, for documentation and tests."""
    names = ["attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"]
    outer = ["embedding", "final_norm"]
    return ModelSpec(
        name="example",
        sizes=Sizes(vocab=64, hidden=32, layers=2, ffn=48, context=128),
        norm=Norm("rms", 1e-5),
        attention=Attention("gqa", heads=4, kv_heads=2, head_dim=8, scale=1 / math.sqrt(8)),
        position=Position("rope", 10000.0, "half"),
        mlp=Mlp("gated", "silu"),
        head=Head(tied=True),
        tokens=Tokens(bos=1, eos=(2,), add_bos=False),
        tensors={name: name for name in [f"layers.{{layer}}.{name}" for name in names] + outer},
    )
