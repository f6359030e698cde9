"""config.json -> ModelSpec, by the table in hf_families.py. Every fault is told at once."""

from __future__ import annotations

import math
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import EOS_LIMIT, ModelSpec, Tokens, range_fault
from llmc.compiler.spec_fields import clip, near
from llmc.frontends.assemble import assemble
from llmc.frontends.hf_families import ACTIVATIONS, FAMILIES, INVERSE_ROOTS, IRRELEVANT, MUST_BE_OFF, Family
from llmc.frontends.hf_positions import positions, rope_keys
from llmc.frontends.hf_quantization import KEY, packing_of

_TOKEN_KEYS = ("bos_token_id", "eos_token_id")


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
    settings = {
        "position.layout": "half",
        **family.settings,
        **_numbers(config, family, faults),
        **_flags(config, family, faults),
    }
    settings |= positions(config, family, settings.get("sizes.layers"), faults)
    tokens = _tokens(config, generation, prompt_bos, settings.get("sizes.vocab"), faults)
    packing_of(config, faults)
    if faults:
        raise SourceError(f"config.json: {'; '.join(faults)}")
    settings["mlp.activation"] = ACTIVATIONS[config.get(family.activation, family.defaults[family.activation])]
    settings["norm.eps"] = float(settings["norm.eps"])
    if family.scaled_embedding:
        settings["embedding.scale"] = math.sqrt(settings["sizes.hidden"])
    return assemble(name, settings, tokens, family.tensors)


def _unknown_keys(config: dict[str, Any], family: Family) -> list[str]:
    meant = [*family.numbers, *family.flags, *family.only, family.activation, *_TOKEN_KEYS, "model_type", KEY]
    meant += [*rope_keys(family), *(family.windows.keys if family.windows else ())]
    known = {*meant, *IRRELEVANT, *MUST_BE_OFF}
    unknown = [near(key, meant) for key in config if key not in known]
    if not unknown:
        return []
    return [f"unknown keys {', '.join(unknown)}: llmc does not guess what they do to the model"]


def _refused_values(config: dict[str, Any], family: Family) -> list[str]:
    faults = [
        f"{key} is set: {why}" for key, why in MUST_BE_OFF.items() if config.get(key) not in (None, False, {}, [])
    ]
    for key, values in {**family.only, family.activation: tuple(ACTIVATIONS)}.items():
        value = config.get(key, family.defaults.get(key))
        if not any(value is known or (value == known and type(value) is type(known)) for known in values):
            faults.append(f"{key} = {clip(value)}, llmc knows: {', '.join(map(repr, values))}")
    return faults


def _numbers(config: dict[str, Any], family: Family, faults: list[str]) -> dict[str, Any]:
    """Fields of the spec -> numbers within their bounds; derived ones filled in."""
    numbers: dict[str, Any] = {}
    derived = ("num_key_value_heads", "head_dim")  # null: follows from the others
    for key, path in family.numbers.items():
        if key not in config and key not in family.defaults:
            faults.append(f"missing key {key}")
            continue
        value: Any = config.get(key, family.defaults.get(key))
        if value is None and key in derived:
            continue
        fault = range_fault(path, value, key)
        if fault:
            faults.append(fault)
        else:
            numbers[path] = value**-0.5 if key in INVERSE_ROOTS else value
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
        else:
            numbers.setdefault("attention.scale", 1 / math.sqrt(numbers["attention.head_dim"]))
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
