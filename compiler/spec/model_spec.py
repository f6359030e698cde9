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
    Pooling,
    Position,
    Scaling,
    Sizes,
    Tokens,
    Window,
    Wiring,
)
from llmc.compiler.spec.faults import spec_faults
from llmc.compiler.spec.fields import clip, read_dataclass, table_of, write_toml
from llmc.compiler.text_file import parse_toml

TOML_LIMIT = 1 << 20  # characters of a spec file


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
    latent: Latent = Latent()
    encoder: Encoder | None = None  # none: the model goes on with the text it reads
    convolution: Convolution | None = None  # none: every layer has attention

    def __post_init__(self) -> None:
        faults = spec_faults(self)
        if faults:
            raise SpecError(f"spec of {clip(self.name)}: " + "; ".join(faults))


def _blocks(optional: bool) -> dict[str, type]:
    hints = {name: hint for name, hint in get_type_hints(ModelSpec).items() if table_of(hint) not in (None, Tokens)}
    return {name: kind for name, hint in hints.items() if (kind := table_of(hint)) and (kind is not hint) == optional}


# Field -> class: of the blocks that every model has, and of those that one may lack.
BLOCKS, OPTIONAL_BLOCKS = _blocks(optional=False), _blocks(optional=True)


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
    spec = read_dataclass(ModelSpec, plain, "", faults)
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
