"""config.json -> ModelSpec, by the table in hf_families.py. Every fault is told at once."""

from __future__ import annotations

import math
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import (
    EOS_LIMIT,
    Attention,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    Position,
    Sizes,
    Tokens,
    range_fault,
)
from llmc.compiler.spec_fields import clip, near
from llmc.frontends.hf_families import FAMILIES, IRRELEVANT, MUST_BE_OFF, Family

DEFAULT_THETA = 10000.0  # transformers PreTrainedConfig.default_theta
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id")
_ACTIVATIONS = {"silu": "silu", "swish": "silu"}


def family_of(config: dict[str, Any]) -> Family:
    """The row for `model_type`. Raises SourceError for one that llmc does not know."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise SourceError(
            f"config.json: model_type is {clip(kind)}, llmc knows: {', '.join(FAMILIES)}. "
            "If the model is built like one of these, give a spec file"
        )
    return FAMILIES[kind]


def derive_spec(config: dict[str, Any], generation: dict[str, Any], name: str, prompt_bos: int | None) -> ModelSpec:
    """The spec of a Hugging Face model.

    `generation` is generation_config.json ({} if none). `prompt_bos` is the id that the tokenizer
    puts before a text, None when it puts none. Raises SourceError naming every key that is unknown,
    missing, refused or out of bounds.
    """
    family = family_of(config)
    faults = [*_unknown_keys(config, family), *_refused_values(config, family)]
    numbers = _numbers(config, family, faults)
    flags = _flags(config, family, faults)
    theta = _theta(config, faults)
    tokens = _tokens(config, generation, prompt_bos, numbers.get("sizes.vocab"), faults)
    if faults:
        raise SourceError(f"config.json: {'; '.join(faults)}")
    sizes = {path.split(".")[1]: n for path, n in numbers.items() if path.startswith("sizes.")}
    tied, bias = flags["head.tied"], flags.get("attention.bias", False)
    spec_flags = (bias, flags.get("mlp.bias", False), tied)
    return ModelSpec(
        name=name,
        sizes=Sizes(**sizes),
        norm=Norm("rms", float(numbers["norm.eps"])),
        attention=Attention(
            kind="gqa",
            heads=numbers["attention.heads"],
            kv_heads=numbers["attention.kv_heads"],
            head_dim=numbers["attention.head_dim"],
            scale=1 / math.sqrt(numbers["attention.head_dim"]),
            bias=bias,
            output_bias=flags.get("attention.output_bias", False),
        ),
        position=Position("rope", theta, "half"),
        mlp=Mlp("gated", _ACTIVATIONS[config.get("hidden_act", "silu")], spec_flags[1]),
        head=Head(tied),
        tokens=tokens,
        tensors=_wanted(family.tensors, *spec_flags),
    )


def _wanted(tensors: dict[str, str], bias: bool, mlp_bias: bool, tied: bool) -> dict[str, str]:
    """The rows of a family's tensor table that a model with these settings has."""
    attention = {f"layers.{{layer}}.{name}_bias" for name in "qkvo"}
    mlp = {f"layers.{{layer}}.{name}_bias" for name in ("gate", "up", "down")}
    off = (attention if not bias else set()) | (mlp if not mlp_bias else set())
    off |= {"head"} if tied else set()
    return {ours: theirs for ours, theirs in tensors.items() if ours not in off}


def _unknown_keys(config: dict[str, Any], family: Family) -> list[str]:
    meant = [*family.numbers, *family.flags, *family.only, *_ROPE_KEYS, *_TOKEN_KEYS, "model_type"]
    known = {*meant, *IRRELEVANT, *MUST_BE_OFF}
    unknown = [near(key, meant) for key in config if key not in known]
    if not unknown:
        return []
    return [f"unknown keys {', '.join(unknown)}: llmc does not guess what they do to the model"]


def _refused_values(config: dict[str, Any], family: Family) -> list[str]:
    faults = [
        f"{key} is set: {why}" for key, why in MUST_BE_OFF.items() if config.get(key) not in (None, False, {}, [])
    ]
    for key, values in family.only.items():
        value = config.get(key, family.defaults.get(key))
        if not any(value is known or (value == known and type(value) is type(known)) for known in values):
            note = f" ({family.notes[key]})" if key in family.notes else ""
            faults.append(f"{key} = {clip(value)}, llmc knows: {', '.join(map(repr, values))}{note}")
    return faults


def _numbers(config: dict[str, Any], family: Family, faults: list[str]) -> dict[str, Any]:
    """Fields of the spec -> numbers within their bounds; derived ones filled in."""
    numbers: dict[str, Any] = {}
    derived = ("num_key_value_heads", "head_dim")  # null: follows from the others
    for key, path in family.numbers.items():
        if key not in config and key not in family.defaults:
            faults.append(f"missing key {key}")
            continue
        value = config.get(key, family.defaults.get(key))
        if value is None and key in derived:
            continue
        fault = range_fault(path, value, key)
        if fault:
            faults.append(fault)
        else:
            numbers[path] = value
    heads, hidden = numbers.get("attention.heads"), numbers.get("sizes.hidden")
    if heads and hidden:
        numbers.setdefault("attention.kv_heads", heads)
        if "attention.head_dim" not in numbers and hidden % heads:
            faults.append(
                f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}, and head_dim is not given"
            )
        numbers.setdefault("attention.head_dim", hidden // heads)
        if heads % numbers["attention.kv_heads"]:
            faults.append(
                f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {numbers['attention.kv_heads']}"
            )
        if numbers["attention.head_dim"] % 2 or numbers["attention.head_dim"] < 2:
            faults.append(f"head_dim = {numbers['attention.head_dim']}, wanted an even number")
    return numbers


def _flags(config: dict[str, Any], family: Family, faults: list[str]) -> dict[str, bool]:
    flags = {}
    for key, paths in family.flags.items():
        value = config.get(key, family.defaults.get(key))
        if not isinstance(value, bool):
            faults.append(f"{key} = {clip(value)}, wanted true or false")
        for path in paths:
            flags[path] = value is True
    return flags


def _theta(config: dict[str, Any], faults: list[str]) -> float:
    """The base of rope: transformers 5 writes `rope_parameters`, older ones the other two keys."""
    thetas = {}
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            faults.append(f"{key} = {clip(table)}, wanted a table or null")
            continue
        kinds = [table[name] for name in ("rope_type", "type") if name in table]
        if any(kind != "default" for kind in kinds) or not (kinds or "rope_theta" in table):
            faults.append(
                f"{key} is {clip(table)}: llmc knows rope_type 'default' only; "
                "without the key the model runs up to the length it was first trained for"
            )
            continue
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            faults.append(f"{key}.partial_rotary_factor = {clip(table['partial_rotary_factor'])}, wanted 1")
        known = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        unknown = [near(str(name), known) for name in table if name not in known]
        if unknown:
            faults.append(f"{key} has unknown keys {', '.join(unknown)}")
        if "rope_theta" in table:
            thetas[f"{key}.rope_theta"] = table["rope_theta"]
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = config["rope_theta"]
    wrong = [f for key, theta in thetas.items() if (f := range_fault("position.theta", theta, key))]
    faults += wrong
    if not wrong and len({float(theta) for theta in thetas.values()}) > 1:
        values = ", ".join(f"{key} = {clip(theta)}" for key, theta in thetas.items())
        faults.append(f"{values} disagree; keep the right one")
    if wrong or not thetas:
        return DEFAULT_THETA
    return float(next(iter(thetas.values())))


def _tokens(
    config: dict[str, Any],
    generation: dict[str, Any],
    prompt_bos: int | None,
    vocab: int | None,
    faults: list[str],
) -> Tokens:
    """Ends of text: those of generation_config.json first, then those of config.json."""
    ends: list[int] = []
    bos = None
    for table, label in ((generation, "generation_config.json: "), (config, "")):
        value = table.get("eos_token_id")
        listed = value if isinstance(value, list) else [value] if value is not None else []
        if len(listed) > EOS_LIMIT:
            faults.append(f"{label}eos_token_id has {len(listed)} ids, wanted {EOS_LIMIT} at most")
        for id_ in listed[:EOS_LIMIT]:
            if not _is_id(id_, vocab):
                faults.append(_bad_id(f"{label}eos_token_id", id_, vocab))
            elif id_ not in ends:
                ends.append(id_)
        start = table.get("bos_token_id")
        if start is not None and not _is_id(start, vocab):
            faults.append(_bad_id(f"{label}bos_token_id", start, vocab))
        elif start is not None:
            bos = start
    if prompt_bos is not None and bos is not None and prompt_bos != bos:
        faults.append(
            f"bos_token_id = {bos}, but tokenizer.json starts a text with id {prompt_bos}; "
            "correct the one that is wrong"
        )
    return Tokens(prompt_bos if bos is None else bos, tuple(ends), prompt_bos is not None)


def _is_id(value: Any, vocab: int | None) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= value < (1 << 63 if vocab is None else vocab)


def _bad_id(key: str, value: Any, vocab: int | None) -> str:
    bound = f" below vocab_size = {vocab}" if vocab is not None else ""
    return f"{key} = {clip(value)}, wanted a token id{bound}"
