"""A model's layers cut into parts of about equal size, one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.errors import LlmcError

if TYPE_CHECKING:
    from llmc.compiler.spec.model_spec import ModelSpec

EMBED, HEAD = "embed", "head"  # the functions before and behind the parts


def part_name(number: int) -> str:
    """The function of a part."""
    return f"part_{number}"


def part_sizes(spec: ModelSpec, count: int | None) -> tuple[int, ...]:
    """Layers of each of `count` parts; no parts where that is None.

    Raises LlmcError for a model that does not generate text from a prompt that it reads, or has fewer layers.
    """
    if count is None:
        return ()
    if spec.encoder is not None or not spec.attention.causal or spec.pooling is not None or spec.head.kind == "hidden":
        raise LlmcError("--layer-groups: only for a model that reads a prompt and goes on with it; leave it out")
    layers = spec.sizes.layers
    if not 2 <= count <= layers:
        raise LlmcError(f"--layer-groups {count}: wanted 2..{layers}, as this model has {layers} layers")
    return tuple(layers * (n + 1) // count - layers * n // count for n in range(count))
