"""Settings, as a frontend reads them from metadata -> ModelSpec. Both frontends end here.

Settings are "block.field" -> value; what a family of models fixes and what its file says are equal in rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from llmc.compiler.spec import BLOCKS, OPTIONAL_BLOCKS, ModelSpec, Tokens
from llmc.compiler.spec.tensors import required_tensors

# The kinds that every model llmc reads so far has.
KINDS = {"norm.kind": "rms", "attention.kind": "gqa", "position.kind": "rope", "mlp.kind": "gated"}


def assemble(name: str, settings: Mapping[str, Any], tokens: Tokens, tensors: Mapping[str, str]) -> ModelSpec:
    """The spec of these settings. `tensors` maps our names to the file's, more than this model may have.

    Raises SpecError when the settings do not hold together.
    """
    settings = {**KINDS, **settings}

    def block(prefix: str) -> dict[str, Any]:
        return {path[len(prefix) + 1 :]: value for path, value in settings.items() if path.startswith(f"{prefix}.")}

    blocks: dict[str, Any] = {name: kind(**block(name)) for name, kind in BLOCKS.items()}
    optional: dict[str, Any] = {name: kind(**block(name)) for name, kind in OPTIONAL_BLOCKS.items() if block(name)}
    wanted = required_tensors(SimpleNamespace(**(dict.fromkeys(OPTIONAL_BLOCKS) | blocks | optional)))
    named = {ours: tensors[ours] for ours in wanted if ours in tensors}
    return ModelSpec(name=name, tokens=tokens, tensors=named, **blocks, **optional)
