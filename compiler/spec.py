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
from typing import Any

from llmc.compiler.errors import SpecError
from llmc.compiler.spec_fields import clip, near, read_dataclass, write_toml
from llmc.compiler.spec_tensors import expand, required_tensors, tensor_shapes, weight_count
from llmc.compiler.text_file import parse_toml

__all__ = [
    "CHOICES",
    "LIMITS",
    "Attention",
    "Embedding",
    "Head",
    "Mlp",
    "ModelSpec",
    "Norm",
    "Position",
    "Sizes",
    "Tokens",
    "Window",
    "example",
    "expand",
    "from_dict",
    "from_toml",
    "tensor_shapes",
    "to_dict",
    "to_toml",
    "weight_count",
]

# What each number may be: far above any known model, far below what would exhaust memory before a
# weight is read.
LIMITS: dict[str, tuple[float, float]] = {
    "sizes.vocab": (1, 1 << 24),
    "sizes.hidden": (1, 1 << 18),
    "sizes.layers": (1, 1 << 10),
    "sizes.ffn": (1, 1 << 20),
    "sizes.context": (1, 1 << 27),
    "norm.eps": (1e-20, 1.0),
    "attention.heads": (1, 1 << 12),
    "attention.kv_heads": (1, 1 << 12),
    "attention.head_dim": (2, 1 << 12),
    "attention.scale": (1e-6, 1e3),
    "position.theta": (1.0, 1e15),
    "position.factor": (1.0, 1e6),
    "embedding.scale": (1e-6, 1e6),
    "window.size": (1, 1 << 27),
    "window.theta": (1.0, 1e15),
    "window.factor": (1.0, 1e6),
}

# The kinds each block can be; a new kind is a row here, a case in frontends/build.py and its op.
CHOICES: dict[str, tuple[str, ...]] = {
    "norm.kind": ("rms",),
    "norm.weight": ("plain", "plus_one"),
    "norm.place": ("pre", "sandwich"),
    "attention.kind": ("gqa",),
    "attention.qk_norm": ("none", "head"),
    "position.kind": ("rope",),
    "position.layout": ("half", "interleaved"),
    "mlp.kind": ("gated",),
    "mlp.activation": ("silu", "gelu_tanh"),
}

NAME_LIMIT = 200  # characters in a model's name
EOS_LIMIT = 64  # ids that end a text
TOML_LIMIT = 1 << 20  # characters of a spec file


@dataclass(frozen=True)
class Sizes:
    """Numbers of: vocabulary entries, model width, layers, MLP width, positions."""

    vocab: int
    hidden: int
    layers: int
    ffn: int
    context: int


@dataclass(frozen=True)
class Norm:
    """`rms`: x / sqrt(mean(x^2) + eps) * weight (https://arxiv.org/abs/1910.07467).

    `weight` "plus_one": the file stores the weight less one, in every norm; reading adds it. `place` "pre": attention
    and MLP read a norm of the sum so far; "sandwich": what they give is normed too before it is added
    (https://arxiv.org/abs/2105.13290).
    """

    kind: str
    eps: float
    weight: str = "plain"
    place: str = "pre"


@dataclass(frozen=True)
class Attention:
    """`gqa`: `heads` queries share `kv_heads` keys and values (https://arxiv.org/abs/2305.13245).

    `scale` multiplies q.k before the softmax; `bias` is for q, k and v, `output_bias` for o. `qk_norm` "head": each
    head of q and k passes a norm of its own (weights of head_dim) before rope (https://arxiv.org/abs/2302.05442).
    """

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False
    output_bias: bool = False
    qk_norm: str = "none"


@dataclass(frozen=True)
class Position:
    """`rope` with base `theta`, of positions divided by `factor` (https://arxiv.org/abs/2104.09864).

    `half` rotates (x[i], x[i + head_dim/2]), `interleaved` rotates (x[2i], x[2i + 1]). A factor other than 1 is linear
    scaling (https://arxiv.org/abs/2306.15595).
    """

    kind: str
    theta: float
    layout: str
    factor: float = 1.0


@dataclass(frozen=True)
class Window:
    """Sliding-window attention (https://arxiv.org/abs/2004.05150) in some layers, with rope of their own.

    In `layers` (indices from 0, ascending) a row sees the last `size` tokens, its own included; `theta` and `factor`
    are for them what Position's are for the other layers.
    """

    size: int
    layers: tuple[int, ...]
    theta: float
    factor: float = 1.0


@dataclass(frozen=True)
class Mlp:
    """`gated`: down(activation(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202).

    `bias` is for all three.
    """

    kind: str
    activation: str
    bias: bool = False


@dataclass(frozen=True)
class Embedding:
    """`scale` multiplies what is looked up; a tied head reads the table as it is."""

    scale: float = 1.0


@dataclass(frozen=True)
class Head:
    """`tied`: the embedding is also the output matrix, and there is no tensor "head"."""

    tied: bool


@dataclass(frozen=True)
class Tokens:
    """Ids with a meaning. `add_bos`: a text starts with `bos`. Any of `eos` ends the answer."""

    bos: int | None
    eos: tuple[int, ...]
    add_bos: bool


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

    def __post_init__(self) -> None:
        faults = [*_range_faults(self), *_choice_faults(self)]
        faults = faults or [*_relation_faults(self), *_token_faults(self), *_tensor_faults(self)]
        if faults:
            raise SpecError(f"spec of {clip(self.name)}: " + "; ".join(faults))


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
    # A NaN fails every comparison, so it is refused here too.
    if number and not isinstance(value, bool) and low <= value <= high:
        return None
    kind = "a whole number" if whole else "a number"
    return f"{label or path} = {clip(value)}, wanted {kind} from {low} to {high}"


def _range_faults(spec: ModelSpec) -> list[str]:
    return [fault for path in LIMITS if _has(spec, path) and (fault := range_fault(path, _value(spec, path)))]


def _choice_faults(spec: ModelSpec) -> list[str]:
    return [
        f"{path} = {clip(_value(spec, path))}, llmc knows: {', '.join(known)}"
        for path, known in CHOICES.items()
        if _value(spec, path) not in known
    ]


def _relation_faults(spec: ModelSpec) -> list[str]:
    faults = []
    attention = spec.attention
    if attention.heads % attention.kv_heads:
        faults.append(f"attention.heads = {attention.heads} is no multiple of kv_heads = {attention.kv_heads}")
    if attention.head_dim % 2:
        faults.append(f"attention.head_dim = {attention.head_dim}, wanted an even number for rope")
    layers = spec.window.layers if spec.window else (0,)
    ascending = all(a < b for a, b in zip(layers, layers[1:], strict=False))
    if not layers or not ascending or layers[0] < 0 or layers[-1] >= spec.sizes.layers:
        faults.append(
            f"window.layers = {clip(layers)}, wanted indices from 0 to {spec.sizes.layers - 1}, ascending, at least one"
        )
    if not 1 <= len(spec.name) <= NAME_LIMIT or not spec.name.isprintable():
        faults.append(f"name = {clip(spec.name)}, wanted 1 to {NAME_LIMIT} printable characters")
    return faults


def _token_faults(spec: ModelSpec) -> list[str]:
    tokens, vocab = spec.tokens, spec.sizes.vocab
    ids = [("tokens.bos", tokens.bos)] if tokens.bos is not None else []
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
    faults += [
        f"tensors: {clip(ours)} = {clip(theirs)}, wanted {{layer}} once on both sides or on neither"
        for ours, theirs in spec.tensors.items()
        if ours.count("{layer}") != theirs.count("{layer}")
    ]
    faults += [
        f"tensors: {clip(ours)} = {clip(theirs)}, wanted printable characters"
        for ours, theirs in spec.tensors.items()
        if not theirs.isprintable()
    ]
    if len(set(spec.tensors.values())) != len(spec.tensors):
        faults.append("tensors gives one name of the file to several of ours")
    return faults


def to_dict(spec: ModelSpec) -> dict[str, Any]:
    """The spec as plain JSON values, the same for equal specs."""
    plain = asdict(spec)
    plain["tokens"]["eos"] = list(spec.tokens.eos)
    if spec.window:
        plain["window"]["layers"] = list(spec.window.layers)
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
