"""Settings, as a frontend reads them from metadata -> ModelSpec. Both frontends end here.

Settings are "block.field" -> value; what a family of models fixes and what its file says are equal in rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec import (
    Attention,
    Embedding,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    Position,
    Sizes,
    Tokens,
    Window,
)
from llmc.compiler.spec_tensors import names_wanted

# The kinds that every model llmc reads so far has.
KINDS = {"norm.kind": "rms", "attention.kind": "gqa", "position.kind": "rope", "mlp.kind": "gated"}


def assemble(name: str, settings: Mapping[str, Any], tokens: Tokens, tensors: Mapping[str, str]) -> ModelSpec:
    """The spec of these settings. `tensors` maps our names to the file's, more than this model may have.

    Raises SpecError when the settings do not hold together.
    """
    settings = {**KINDS, **settings}

    def block(prefix: str) -> dict[str, Any]:
        return {path[len(prefix) + 1 :]: value for path, value in settings.items() if path.startswith(f"{prefix}.")}

    norm, attention, mlp, head = (
        Norm(**block("norm")), Attention(**block("attention")), Mlp(**block("mlp")), Head(**block("head")),
    )  # fmt: skip
    made = {"norm": norm, "attention": attention, "mlp": mlp, "head": head}
    wanted = names_wanted(lambda path: getattr(made[path.split(".")[0]], path.split(".")[1]))
    return ModelSpec(
        name=name,
        sizes=Sizes(**block("sizes")),
        norm=norm,
        attention=attention,
        position=Position(**block("position")),
        mlp=mlp,
        head=head,
        tokens=tokens,
        tensors={ours: tensors[ours] for ours in wanted if ours in tensors},
        embedding=Embedding(**block("embedding")),
        window=Window(**block("window")) if block("window") else None,
    )
