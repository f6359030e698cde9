"""In which ways a model can go on with a text for which its cache has no room left (docs/endless.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.spec.layer_groups import layer_groups

if TYPE_CHECKING:
    from llmc.compiler.spec.model_spec import ModelSpec


def endless_modes(spec: ModelSpec) -> tuple[str, ...]:
    """Of "sinks", "shift" and "reevaluate" those that the model can do: none where its text ends with what it reads."""
    if not _goes_on(spec):
        return ()
    modes = {"sinks": _slides(spec), "shift": turns(spec) and len(layer_groups(spec)) == 1, "reevaluate": True}
    return tuple(mode for mode, can in modes.items() if can)


def turns(spec: ModelSpec) -> bool:
    """Whether keys in the cache are turned when a text slides, for which the module has the function `turn`.

    Layers with a window need none: they do not see what stands before the hole.
    """
    return _goes_on(spec) and _told_by_rope(spec) and _slides(spec)


def _goes_on(spec: ModelSpec) -> bool:
    """Whether the model adds to a text, without another one that it reads as a whole."""
    return spec.attention.causal and spec.pooling is None and spec.encoder is None


def _slides(spec: ModelSpec) -> bool:
    """Whether only the distances between tokens matter, not where they stand."""
    if spec.position.kind != "rope":
        return spec.position.kind not in ("learned", "sinusoidal")
    normed = spec.attention.qk_norm != "none" and spec.attention.qk_norm_place == "after_rope"
    grown = spec.scaling is not None and spec.scaling.queries != 0
    return not normed and not grown


def _told_by_rope(spec: ModelSpec) -> bool:
    """Whether rope turns keys of a layer that sees the whole text."""
    far = layer_groups(spec)[0]
    return spec.position.kind == "rope" and not far.window and not set(far.layers) <= set(spec.position.plain_layers)
