"""GGUF metadata -> ModelSpec, by the tables in gguf_architectures.py. Every fault is told at once."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import EOS_LIMIT, LIMITS, ModelSpec, Tokens, range_fault
from llmc.compiler.spec_fields import clip, near
from llmc.frontends.assemble import assemble
from llmc.frontends.gguf_architectures import (
    ARCHITECTURES,
    DEFAULT_THETA,
    NO_WINDOW,
    NUMBERS,
    ONLY,
    OPTIONAL,
    REQUIRED,
    ROTATED,
    SCALING,
    TENSORS,
    WINDOW_NUMBERS,
    WINDOW_PERIOD,
    Architecture,
)
from llmc.frontends.gguf_tokenizer import adds_bos_by_default
from llmc.frontends.model_name import clean_name

_GENERAL_ONLY = {"general.type": ("model",)}
_IGNORED_SPACES = ("general.", "quantize.imatrix.", "tokenizer.")


def derive_spec(metadata: dict[str, Any], tensors: Collection[str], stem: str) -> ModelSpec:
    """The spec of a GGUF file from its metadata and the names of its tensors.

    `stem` is its name if the metadata has none. Raises SourceError naming every key that is
    unknown, missing, refused or out of bounds.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise SourceError(f"general.architecture is {clip(kind)}, llmc knows: {', '.join(ARCHITECTURES)}")
    rule = ARCHITECTURES[kind]
    faults = _foreign_keys(metadata, kind)
    own = {key[len(kind) + 1 :]: v for key, v in metadata.items() if key.startswith(f"{kind}.")}
    faults += _only_faults(own, kind, rule)
    settings = _numbers(own, kind, metadata, rule, faults)
    tokens = _tokens(metadata, settings.get("sizes.vocab"), faults)
    if faults:
        raise SourceError("; ".join(faults))
    names = TENSORS | rule.tensors
    for field, (with_them, without, table) in OPTIONAL.items():
        first = next(iter(table.values())).replace("{layer}", "0")
        settings[field] = with_them if first in tensors else without
        names = names | table
    title = metadata.get("general.name")
    name = clean_name(title if isinstance(title, str) else stem)
    return assemble(name, rule.settings | settings, tokens, names)


def _foreign_keys(metadata: dict[str, Any], kind: str) -> list[str]:
    faults = []
    unknown = [key for key in metadata if not key.startswith((f"{kind}.", *_IGNORED_SPACES))]
    if unknown:
        faults.append(f"unknown keys {', '.join(map(clip, unknown))}")
    for key, values in _GENERAL_ONLY.items():
        if key in metadata and metadata[key] not in values:
            faults.append(f"{key} = {clip(metadata[key])}, wanted {values[0]!r}")
    return faults


def _only_faults(own: dict[str, Any], kind: str, rule: Architecture) -> list[str]:
    only = ONLY if rule.window else ONLY | NO_WINDOW
    known = {*NUMBERS, *only, ROTATED}
    if rule.window:
        known |= {*WINDOW_NUMBERS, WINDOW_PERIOD}
    faults = []
    unknown = [key for key in own if key not in known]
    if unknown:
        shown = ", ".join(f"{kind}.{near(key, known)}" for key in unknown)
        faults.append(f"unknown keys {shown}: llmc does not guess what they do to the model")
    for key, values in only.items():
        value = own.get(key, values[0])
        if not any(value == wanted and type(value) is type(wanted) for wanted in values):
            faults.append(f"{kind}.{key} = {clip(value)}, llmc knows: {', '.join(map(repr, values))}")
    return faults


def _numbers(
    own: dict[str, Any], kind: str, metadata: dict[str, Any], rule: Architecture, faults: list[str]
) -> dict[str, Any]:
    """Fields of the spec -> numbers within their bounds, derived ones filled in."""
    settings: dict[str, Any] = {}
    required = (*REQUIRED, "attention.sliding_window") if rule.window else REQUIRED
    faults += [f"missing key {kind}.{key}" for key in required if key not in own]
    for key, path in {**NUMBERS, **(WINDOW_NUMBERS if rule.window else {})}.items():
        if key not in own:
            continue
        value = _uniform(own[key])
        fault = range_fault(path, value, f"{kind}.{key}")
        if fault:
            faults.append(fault)
        elif settings.setdefault(path, value) != value:
            faults.append(f"{kind}.{key} = {clip(value)}, but {path} is {settings[path]} elsewhere")
    _vocabulary(settings, kind, metadata, faults)
    settings.setdefault("position.theta", DEFAULT_THETA)
    if own.get(SCALING) == "none":
        settings.pop("position.factor", None)
    heads, hidden = settings.get("attention.heads"), settings.get("sizes.hidden")
    if not heads or not hidden:
        return settings
    settings.setdefault("attention.kv_heads", heads)
    if "attention.head_dim" not in settings and hidden % heads:
        faults.append(f"embedding_length = {hidden} is no multiple of head_count = {heads}")
    head_dim = settings.setdefault("attention.head_dim", hidden // heads)
    if fault := range_fault("attention.head_dim", head_dim):
        faults.append(fault)
        return settings
    if own.get(ROTATED, head_dim) != head_dim:
        faults.append(f"{kind}.{ROTATED} = {clip(own[ROTATED])}, wanted head_dim = {head_dim}")
    layers = settings.get("sizes.layers")
    divisor = hidden / heads if layers in rule.width_scaled else head_dim
    settings.setdefault("attention.scale", 1 / math.sqrt(divisor))
    if rule.scaled_embedding:
        settings["embedding.scale"] = math.sqrt(hidden)
    if rule.window and layers:
        _window(settings, own, kind, layers, rule, faults)
    return settings


def _vocabulary(settings: dict[str, Any], kind: str, metadata: dict[str, Any], faults: list[str]) -> None:
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    if isinstance(vocabulary, list) and vocabulary:
        if settings.setdefault("sizes.vocab", len(vocabulary)) != len(vocabulary):
            faults.append(
                f"{kind}.vocab_size = {settings['sizes.vocab']}, but the tokenizer has {len(vocabulary)} tokens"
            )
    elif "sizes.vocab" not in settings:
        faults.append("missing key tokenizer.ggml.tokens")


def _window(
    settings: dict[str, Any], own: dict[str, Any], kind: str, layers: int, rule: Architecture, faults: list[str]
) -> None:
    assert rule.window is not None
    period = own.get(WINDOW_PERIOD, rule.window.period)
    most = int(LIMITS["sizes.layers"][1])
    if not isinstance(period, int) or isinstance(period, bool) or not 2 <= period <= most:
        faults.append(f"{kind}.{WINDOW_PERIOD} = {clip(period)}, wanted a whole number from 2 to {most}")
        return
    # As llama.cpp's set_swa_pattern: the last of each period sees the whole text.
    settings["window.layers"] = tuple(i for i in range(layers) if i % period < period - 1)
    settings.setdefault("window.theta", rule.window.theta)


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
