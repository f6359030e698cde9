"""Kinds of rules that a row of gguf/architectures.py is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmc.frontends.gguf.experts import Mixture


@dataclass(frozen=True)
class WindowRule:
    """All layers but every `period`-th have a sliding window; None: all have.

    Rope of these layers has base `theta` and no scaling; None: it is that of the others. `size`: the window's where the
    file does not say it, 0 is none; None: it must. The file may say otherwise (keys `WINDOW_PERIOD`, `WINDOW_NUMBERS`).
    `first`: it is the first of each period that has none, not the last.
    """

    period: int | None
    theta: float | None = None
    size: int | None = None
    first: bool = False


@dataclass(frozen=True)
class Found:
    """What it means that a file has this tensor, in layer 0 if in any: settings, and names beyond those so far.

    In the latter, "{rows}" stands for the tensor's number of rows.
    """

    tensor: str
    settings: dict[str, Any]
    tensors: dict[str, str]


@dataclass(frozen=True)
class Case:
    """What it means that a field of the spec has this value: settings, and names beyond those so far."""

    path: str
    value: Any
    settings: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """`settings`: what the file does not say, as fields of the spec. `tensors`: names beyond `TENSORS`.

    `numbers`, `only`, `required`, `found`: beyond those that all have. `stored`: keys whose number is the "inverse" or
    the "double" of the spec's, or counts both "sides" of a window without the row itself. `flags`: key -> settings for
    its values. `partial`: rope may turn a part of a head. `cases`: what numbers of the file say beyond themselves.
    `plain_period`: the last layer of each such period has no rope; `plain_beside`: nor have layers without a window,
    where others have one.
    `latent`: attention is that of gguf/latent.py. `encoder`: the model is one of gguf/encoder_decoder.py. `convolved`:
    layers may be those of gguf/convolutions.py.
    `yarn`: a file may have it, its ramp's ends "rounded" to whole pairs, as llama.cpp does for all, or "exact".

    `constants`: keys outside "<architecture>." whose numbers, one for each layer, must be that one; None: they are
    weights, gguf/file.py's LISTED.

    `scaled_embedding`: embeddings are multiplied by sqrt(hidden). `width_scaled`: numbers of layers of the models whose
    attention scale is 1 / sqrt(hidden / heads), not 1 / sqrt(head_dim).
    """

    settings: dict[str, Any]
    tensors: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    flags: dict[str, dict[Any, dict[str, Any]]] = field(default_factory=dict)
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    found: tuple[Found, ...] = ()
    constants: dict[str, float | None] = field(default_factory=dict)
    scaled_embedding: bool = False
    width_scaled: tuple[int, ...] = ()
    window: WindowRule | None = None
    partial: bool = False
    cases: tuple[Case, ...] = ()
    plain_period: int = 0
    plain_beside: bool = False
    latent: bool = False
    encoder: bool = False
    convolved: bool = False
    yarn: str = ""
    experts: Mixture | None = None
