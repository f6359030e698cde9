"""GGUF metadata -> ModelSpec, by the tables in gguf_architectures.py. Every fault is told at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import EOS_LIMIT, LIMITS, ModelSpec, Tokens, range_fault
from llmc.compiler.spec.fields import clip, near
from llmc.frontends.assemble import assemble
from llmc.frontends.gguf import convolutions, encoder_decoder, experts, latent
from llmc.frontends.gguf.architectures import (
    ARCHITECTURES,
    DEFAULT_THETA,
    EPS,
    FACTOR_NUMBERS,
    FACTORS,
    FOUND,
    IGNORED,
    NO_WINDOW,
    NUMBERS,
    ONLY,
    REQUIRED,
    ROTATED,
    SCALING,
    TENSORS,
    WINDOW_NUMBERS,
    WINDOW_PERIOD,
    WINDOW_SIZE,
)
from llmc.frontends.gguf.refused import REFUSED
from llmc.frontends.gguf.rules import Architecture, WindowRule
from llmc.frontends.gguf.tokenizer import adds_bos_by_default, ends_by_default
from llmc.frontends.gguf.yarn import yarn_settings
from llmc.frontends.model_name import clean_name

_GENERAL_ONLY = {"general.type": ("model",)}
_IGNORED_SPACES = ("general.", "quantize.imatrix.", "tokenizer.")


def derive_spec(
    metadata: dict[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    stem: str,
    factors: Mapping[str, tuple[float, ...]] | None = None,
) -> ModelSpec:
    """The spec of a GGUF file from its metadata and the names and shapes of its tensors.

    `stem` is its name if the metadata has none, `factors` what the tensors FACTORS that it has hold. Raises SourceError
    naming every key that is unknown, missing, refused or out of bounds.
    """
    kind = _architecture(metadata)
    rule = ARCHITECTURES[kind]
    if factors:
        rule = replace(rule, numbers=rule.numbers | FACTOR_NUMBERS)
    faults = _foreign_keys(metadata, kind, rule.constants)
    own = {key[len(kind) + 1 :]: v for key, v in metadata.items() if key.startswith(f"{kind}.")}
    if rule.experts and rule.experts.optional and own.get(experts.COUNT, 0) == 0:
        rule = replace(rule, experts=None)
    told: dict[str, Any] = {}
    growth = 1.0
    if rule.latent:
        own, told, growth = latent.latent_settings(own, kind, faults)
    start = None
    if rule.encoder:
        own, start = encoder_decoder.encoder_settings(own, kind, faults)
    if rule.convolved:
        own, more = convolutions.convolution_settings(own, kind, faults)
        told |= more
    if rule.yarn:
        own, more = yarn_settings(own, kind, rule.yarn == "rounded", faults)
        told |= more
    faults += _only_faults(own, kind, rule)
    settings = _numbers(own, kind, metadata, rule, faults) | told
    if growth != 1 and "attention.scale" in settings:
        settings["attention.scale"] *= growth
    if rule.encoder:
        settings |= encoder_decoder.more_settings(settings, tied="output.weight" not in tensors)
    if rule.experts and settings.get("sizes.layers"):
        _experts(settings, own, kind, rule.experts, tensors, faults)
    tokens = _tokens(metadata, settings.get("sizes.vocab"), faults)
    if rule.encoder or not rule.settings.get("attention.causal", True):
        tokens = replace(tokens, end=ends_by_default(metadata), start=start)
    if faults:
        raise SourceError("; ".join(faults))
    names = TENSORS | rule.tensors | (experts.expert_names(tensors) if rule.experts else {})
    settings = rule.settings | {"head.tied": True} | _scaling(factors or {}, settings) | settings
    settings, names = _found(settings, names, rule, tensors)
    title = metadata.get("general.name")
    name = clean_name(title if isinstance(title, str) else stem)
    return assemble(name, settings, tokens, names)


def _architecture(metadata: dict[str, Any]) -> str:
    """Which of ARCHITECTURES the file is of."""
    kind = metadata.get("general.architecture")
    if isinstance(kind, str) and kind in REFUSED:
        raise SourceError(
            f"general.architecture is {clip(kind)}, which llmc has no block for: {REFUSED[kind]}; run it elsewhere"
        )
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise SourceError(
            f"general.architecture is {clip(kind)}, llmc knows: {', '.join(ARCHITECTURES)}; "
            "compile the Hugging Face folder that the file was made from, or describe the model in a spec (--spec)"
        )
    return kind


def _found(
    settings: dict[str, Any], names: dict[str, str], rule: Architecture, tensors: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Both, with what the file's tensors and then its numbers say beyond themselves."""
    for found in (*FOUND, *rule.found):
        if shape := tensors.get(found.tensor.replace("{layer}", "0")):
            settings |= found.settings
            names = names | {ours: text.replace("{rows}", str(shape[0])) for ours, text in found.tensors.items()}
    for case in rule.cases:
        if settings.get(case.path) == case.value:
            settings, names = settings | case.settings, names | case.tensors
    return settings, names


def _experts(
    settings: dict[str, Any], own: dict[str, Any], kind: str, rule: experts.Mixture,
    tensors: Mapping[str, tuple[int, ...]], faults: list[str],
) -> None:  # fmt: skip
    """Adds what is said of experts; layers that guess ahead are none of the model's."""
    layers = experts.own_layers(own, kind, settings["sizes.layers"], faults)
    settings["sizes.layers"] = layers
    for path in {"window.layers", "position.plain_layers"} & settings.keys():
        settings[path] = tuple(layer for layer in settings[path] if layer < layers)
    settings |= experts.expert_settings(own, kind, rule, tensors, settings, faults)


def _scaling(factors: Mapping[str, tuple[float, ...]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a rope whose frequencies tensors of the file divide; {} where there are none."""
    if not factors:
        return {}
    scaling = {"scaling.kind": "longrope", "scaling.factor": 1.0, "scaling.original_context": settings["sizes.context"]}
    return scaling | {path: values for name, values in factors.items() for path in FACTORS[name]}


def _foreign_keys(metadata: dict[str, Any], kind: str, constants: Mapping[str, float | None]) -> list[str]:
    """Faults of the keys that are not "`kind`."'s."""
    faults = []
    for key, constant in constants.items():
        values = metadata.get(key)
        if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
            faults.append(f"{key} = {clip(values)}, wanted a number for each layer")
        elif constant is not None and not all(math.isclose(value, constant, rel_tol=0.01) for value in values):
            faults.append(f"{key} = {clip(values)}, llmc knows: {constant}")
    spaces = (f"{kind}.", *_IGNORED_SPACES)
    unknown = [key for key in metadata if not key.startswith(spaces) and key not in constants]
    if unknown:
        faults.append(f"unknown keys {', '.join(map(clip, unknown))}")
    for key, values in _GENERAL_ONLY.items():
        if key in metadata and metadata[key] not in values:
            faults.append(f"{key} = {clip(metadata[key])}, wanted {values[0]!r}")
    return faults


def _number_keys(rule: Architecture) -> dict[str, str]:
    """Key after "<architecture>." -> field of the spec."""
    eps = {} if "norm.eps" in rule.numbers.values() else {EPS[rule.settings.get("norm.kind", "rms")]: "norm.eps"}
    numbers = {**NUMBERS, **eps, **rule.numbers, **(WINDOW_NUMBERS if rule.window else {})}
    if rule.experts:
        numbers |= experts.NUMBERS | ({} if rule.experts.wide else {experts.WIDTH: "experts.ffn"})
    return numbers


def _only_faults(own: dict[str, Any], kind: str, rule: Architecture) -> list[str]:
    only = {**ONLY, **({} if rule.window else NO_WINDOW), **rule.only}
    only |= {key: tuple(values) for key, values in rule.flags.items()}
    only = {key: values for key, values in only.items() if not rule.experts or key not in experts.KEYS}
    known = {*_number_keys(rule), *only, *IGNORED, ROTATED, *(experts.KEYS if rule.experts else ())}
    if rule.window and rule.window.period:
        known.add(WINDOW_PERIOD)
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
    own = _with_window(own, rule.window)
    numbers = _number_keys(rule)
    required = [*REQUIRED, *(key for key, path in numbers.items() if path == "norm.eps"), *rule.required]
    if rule.window and rule.window.size is None:
        required.append(WINDOW_SIZE)
    if rule.experts:
        required += [key for key, path in numbers.items() if path in ("experts.count", "experts.used", "experts.ffn")]
    faults += [f"missing key {kind}.{key}" for key in required if key not in own]
    for key, values in rule.flags.items():
        settings |= values.get(own[key], {}) if isinstance(own.get(key), (int, str)) else {}
    for key, path in numbers.items():
        if key not in own:
            continue
        value = _as_ours(_uniform(own[key]), rule.stored.get(key))
        fault = range_fault(path, value, f"{kind}.{key}")
        if fault:
            faults.append(fault)
        elif settings.setdefault(path, value) != value:
            faults.append(f"{kind}.{key} = {clip(value)}, but {path} is {settings[path]} elsewhere")
    _vocabulary(settings, kind, metadata, faults)
    settings.setdefault("position.theta", DEFAULT_THETA)
    if own.get(SCALING) == "none":
        settings.pop("position.factor", None)
    _derive(settings, own, kind, rule, faults)
    return settings


def _derive(settings: dict[str, Any], own: dict[str, Any], kind: str, rule: Architecture, faults: list[str]) -> None:
    """What follows from the numbers, filled in."""
    heads, hidden = settings.get("attention.heads"), settings.get("sizes.hidden")
    if not heads or not hidden:
        return
    settings.setdefault("attention.kv_heads", heads)
    if "attention.head_dim" not in settings and hidden % heads:
        faults.append(f"embedding_length = {hidden} is no multiple of head_count = {heads}")
    head_dim = settings.setdefault("attention.head_dim", hidden // heads)
    if fault := range_fault("attention.head_dim", head_dim):
        faults.append(fault)
        return
    _rotated(settings, own, kind, head_dim, rule, faults)
    layers = settings.get("sizes.layers")
    divisor = hidden / heads if layers in rule.width_scaled else head_dim
    settings.setdefault("attention.scale", 1 / math.sqrt(divisor))
    if rule.scaled_embedding:
        settings["embedding.scale"] = math.sqrt(hidden)
    if layers and "window.size" in settings:
        _window(settings, own, kind, layers, rule, faults)
    if layers and rule.plain_period:
        last = rule.plain_period - 1
        settings["position.plain_layers"] = tuple(range(last, layers, rule.plain_period))
    if layers and rule.plain_beside and "window.layers" in settings:
        settings["position.plain_layers"] = tuple(i for i in range(layers) if i not in settings["window.layers"])


def _as_ours(value: Any, stored: str | None) -> Any:
    """A number of the file as the spec has it; what is none, or 0, stays, to be refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
        return value
    if stored == "inverse":
        return 1 / value
    if stored == "sides":
        return value // 2 + 1
    return value // 2 if stored == "double" else value


def _rotated(
    settings: dict[str, Any], own: dict[str, Any], kind: str, head_dim: int, rule: Architecture, faults: list[str]
) -> None:
    size = own.get(ROTATED, head_dim)
    if size == head_dim:
        return
    if not rule.partial:
        faults.append(f"{kind}.{ROTATED} = {clip(size)}, wanted head_dim = {head_dim}")
    elif not size or range_fault("position.rotary_dim", size):
        faults.append(f"{kind}.{ROTATED} = {clip(size)}, wanted an even number up to head_dim = {head_dim}")
    else:
        settings["position.rotary_dim"] = size


def _vocabulary(settings: dict[str, Any], kind: str, metadata: dict[str, Any], faults: list[str]) -> None:
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    if isinstance(vocabulary, list) and vocabulary:
        if settings.setdefault("sizes.vocab", len(vocabulary)) != len(vocabulary):
            faults.append(
                f"{kind}.vocab_size = {settings['sizes.vocab']}, but the tokenizer has {len(vocabulary)} tokens"
            )
    elif "sizes.vocab" not in settings:
        faults.append("missing key tokenizer.ggml.tokens")


def _with_window(own: dict[str, Any], window: WindowRule | None) -> dict[str, Any]:
    """`own` with the window's size where it can be left out, and without it where there is none."""
    if window is None or window.size is None:
        return own
    size = own.get(WINDOW_SIZE, window.size)
    rest = {key: value for key, value in own.items() if key not in WINDOW_NUMBERS}
    return rest if size == 0 and type(size) is int else {**own, WINDOW_SIZE: size}


def _window(
    settings: dict[str, Any], own: dict[str, Any], kind: str, layers: int, rule: Architecture, faults: list[str]
) -> None:
    assert rule.window is not None
    if rule.window.theta is None:
        settings["window.factor"] = settings.get("position.factor", 1.0)
    settings.setdefault("window.theta", rule.window.theta or settings["position.theta"])
    if rule.window.period is None:
        settings["window.layers"] = tuple(range(layers))
        return
    period = own.get(WINDOW_PERIOD, rule.window.period)
    if isinstance(period, list):
        _listed_window(settings, period, layers, experts.beyond(own), f"{kind}.{WINDOW_PERIOD}", faults)
        return
    most = int(LIMITS["sizes.layers"][1])
    if not isinstance(period, int) or isinstance(period, bool) or not 2 <= period <= most:
        faults.append(f"{kind}.{WINDOW_PERIOD} = {clip(period)}, wanted a whole number from 2 to {most}")
        return
    # As llama.cpp's set_swa_pattern: the first or the last of each period sees the whole text.
    whole = 0 if rule.window.first else period - 1
    settings["window.layers"] = tuple(i for i in range(layers) if i % period != whole)


def _listed_window(
    settings: dict[str, Any], windowed: list[Any], layers: int, beyond: int, key: str, faults: list[str]
) -> None:
    """The layers of which the file's list says that they have a window; it may leave out the `beyond` last ones."""
    if len(windowed) not in (layers, layers - beyond) or not all(isinstance(item, bool) for item in windowed):
        faults.append(f"{key} = {clip(windowed)}, wanted true or false for each of {layers} layers")
        return
    settings["window.layers"] = tuple(i for i, item in enumerate(windowed) if item)


def _uniform(value: Any) -> Any:
    """The number that a per-layer list repeats; a list of different ones stays, to be refused."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _tokens(metadata: dict[str, Any], vocab: int | None, faults: list[str]) -> Tokens:
    """Ends of text: the end of text, of a turn, of a message (llama.cpp's special_eog_ids)."""
    ids = {}
    for key in ("bos", "eos", "eot", "eom", "cls"):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 0 <= value < (vocab or 1 << 24)):
            faults.append(f"tokenizer.ggml.{key}_token_id = {clip(value)}, wanted an id of a token")
        elif value is not None:
            ids[key] = value
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default(metadata))
    if not isinstance(add_bos, bool):
        faults.append(f"tokenizer.ggml.add_bos_token = {clip(add_bos)}, wanted a boolean")
    if "bos" not in ids and "cls" in ids:  # what an encoder's text starts with
        ids["bos"] = ids["cls"]
    if add_bos is True and "bos" not in ids:
        faults.append("tokenizer.ggml.add_bos_token is set, but bos_token_id is not given")
    ends = dict.fromkeys(ids[key] for key in ("eos", "eot", "eom") if key in ids)
    return Tokens(ids.get("bos"), tuple(ends)[:EOS_LIMIT], add_bos is True)
