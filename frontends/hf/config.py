"""config.json -> ModelSpec, by the family's file (hf_families.py). Every fault is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import EOS_LIMIT, LIMITS, ModelSpec, Tokens, range_fault
from llmc.compiler.spec.fields import clip, near
from llmc.compiler.spec.limits import SWITCHES
from llmc.frontends.assemble import assemble
from llmc.frontends.hf import mlx
from llmc.frontends.hf.convolutions import adjusted, convolutions
from llmc.frontends.hf.experts import expert_layers
from llmc.frontends.hf.families import (
    DERIVED,
    Case,
    Family,
    Number,
    evaluate,
    is_one_of,
    known_families,
    load_family,
    names_in,
)
from llmc.frontends.hf.keys import ACTIVATIONS, IRRELEVANT, MUST_BE_OFF
from llmc.frontends.hf.positions import position_keys, positions
from llmc.frontends.hf.quantization import KEY, packing_of
from llmc.frontends.hf.translation import answer_tokens

_TOKEN_KEYS = ("bos_token_id", "eos_token_id")

# What a number is that neither a key nor the family says.
_DERIVED = {
    "attention.kv_heads": "attention.heads",
    "attention.head_dim": "sizes.hidden / attention.heads",
    "attention.scale": "1 / root attention.head_dim",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The row for `model_type`. Raises SourceError for one that llmc does not know."""
    kind, known = config.get("model_type"), known_families()
    if not isinstance(kind, str) or kind not in known:
        raise SourceError(
            f"config.json: model_type is {near(kind, known) if isinstance(kind, str) else clip(kind)}, "
            f"llmc knows: {', '.join(known)}. If the model is built like one of these, give a spec file"
        )
    return load_family(kind)


def named_as_saved(spec: ModelSpec, family: Family, names: Mapping[str, Any]) -> ModelSpec:
    """The spec for a file with these `names`: without the family's stem when none of them has it, with older ends."""
    stem = "" if any(name.startswith(family.stem) for name in names) else family.stem
    older = {new: old for new, old in family.older.items() if any(name.endswith(old) for name in names)}
    tensors = {}
    for ours, text in spec.tensors.items():
        name, *steps = text.removeprefix(stem).split(" | ")
        for new, old in older.items():
            name = name.removesuffix(new) + old if name.endswith(new) else name
        tensors[ours] = " | ".join([name, *steps])
    return replace(spec, tensors=tensors)


def derive_spec(
    config: dict[str, Any], generation: dict[str, Any], name: str, prompt_bos: int | None, prompt_end: int | None = None
) -> ModelSpec:
    """The spec of a Hugging Face model.

    `generation` is generation_config.json ({} if none). `prompt_bos` and `prompt_end` are the ids that the tokenizer
    puts before and after a text, None when it puts none. Raises SourceError naming every key that is unknown,
    missing, refused or out of bounds.
    """
    family = family_of(config)
    faults: list[str] = []
    table = _flat(config, family, faults)
    faults += [*_unknown_keys(table, family), *_refused_values(table, family)]
    cases = _cases(table, family, faults)
    settings = {"position.layout": "half", **family.settings, **_numbers(table, family, faults)}
    settings |= _flags(table, family, faults)
    derived = _DERIVED | family.derived
    for case in cases:
        settings |= case.settings
        derived |= case.derived
        settings = {path: value for path, value in settings.items() if path not in case.derived}
    _derive(settings, derived, family, faults)
    _scaled_numbers(settings, table, family, faults)
    _check_heads(settings, family, faults)
    settings |= positions(table, family, settings, faults)
    settings |= expert_layers(table, family.experts, settings.get("sizes.layers"), faults)
    settings |= convolutions(table, family.convolutions, settings.get("sizes.layers"), faults)
    settings |= adjusted(table, family.adjusted, settings.get("sizes.ffn"), faults)
    tokens = _tokens(config, generation, prompt_bos, settings.get("sizes.vocab"), faults)
    encoder = "encoder.layers" in settings
    if encoder or not settings.get("attention.causal", True):
        tokens = replace(tokens, end=prompt_end)
    tokens = answer_tokens(tokens, config, generation, settings.get("sizes.vocab"), faults) if encoder else tokens
    packing_of(config, faults)
    if faults:
        raise SourceError(f"config.json: {'; '.join(faults)}")
    if family.activation:
        named = table.get(family.activation.key, family.activation.absent)
        settings["mlp.activation"] = {**ACTIVATIONS, **family.activation.names}[named]
    settings["norm.eps"] = float(settings["norm.eps"])
    return assemble(name, settings, tokens, family.tensors(cases))


def _flat(config: dict[str, Any], family: Family, faults: list[str]) -> dict[str, Any]:
    """The config with its aliases renamed and its nested tables spread out as "table.key"."""
    table: dict[str, Any] = {}
    for key, value in config.items():
        if key in family.nested and isinstance(value, dict):
            table |= {f"{key}.{name}": inner for name, inner in value.items()}
        elif key not in family.aliases:
            table[key] = value
    for key, name in family.aliases.items():
        if key in config and table.setdefault(name, config[key]) != config[key]:
            faults.append(f"{key} = {clip(config[key])}, {name} = {clip(table[name])} disagree; keep the right one")
    return table


def _unknown_keys(config: Mapping[str, Any], family: Family) -> list[str]:
    meant = [*family.numbers, *family.flags, *family.values, *_TOKEN_KEYS, "model_type", KEY, mlx.KEY]
    meant += position_keys(family)
    for rule in (family.experts, family.convolutions, family.adjusted):
        meant += rule.keys() if rule else ()
    meant += [family.activation.key] if family.activation else []
    known = {*meant, *family.irrelevant, *family.off, *IRRELEVANT, *MUST_BE_OFF}
    known |= {f"{table}.{key}" for table in family.nested for key in (*IRRELEVANT, *MUST_BE_OFF)}
    unknown = [near(key, meant) for key in config if key not in known]
    if not unknown:
        return []
    return [f"unknown keys {', '.join(unknown)}: llmc does not guess what they do to the model"]


def _refused_values(config: Mapping[str, Any], family: Family) -> list[str]:
    read = {*family.numbers, *family.flags, *family.values, *family.irrelevant}
    off = {key: why for key, why in (MUST_BE_OFF | family.off).items() if key not in read}
    faults = [f"{key} is set: {why}" for key, why in off.items() if config.get(key) not in (None, False, {}, [])]
    known_values = {key: (known[0], known) for key, known in family.values.items()}
    if family.activation:
        known_values[family.activation.key] = (family.activation.absent, [*ACTIVATIONS, *family.activation.names])
    for key, (absent, known) in known_values.items():
        value = config.get(key, absent)
        if not is_one_of(value, known):
            shown = ", ".join("null" if one == "null" else repr(one) for one in known)
            faults.append(f"{key} = {clip(value)}, llmc knows: {shown}")
    return faults


def _cases(config: Mapping[str, Any], family: Family, faults: list[str]) -> tuple[Case, ...]:
    """The family's cases that hold."""
    values = {key: config.get(key, None if known[0] == "null" else known[0]) for key, known in family.values.items()}
    nulls = {key for key, value in config.items() if value is None}
    cases = tuple(
        case
        for case in family.cases
        if case.holds(values) and not config.keys() & set(case.without) and nulls.issuperset(case.nulls)
    )
    for case in cases:
        if case.refused:
            shown = ", ".join(f"{key} = {clip(values[key])}" for key in case.when)
            faults.append(f"{shown}: {case.refused}")
    return cases


def _numbers(config: Mapping[str, Any], family: Family, faults: list[str]) -> dict[str, Any]:
    """Fields of the spec -> numbers within their bounds, of the keys that need no other field."""
    numbers: dict[str, Any] = {}
    for key, rule in family.numbers.items():
        value = _read_number(key, rule, config, faults)
        if value is not None and rule.value == "value":
            _store(numbers, key, rule, value, value, faults)
        elif value is not None and set(names_in(rule.value)) == {"value"} and _is_positive(key, value, faults):
            _store(numbers, key, rule, evaluate(rule.value, {"value": value}), value, faults)
    return numbers


def _scaled_numbers(settings: dict[str, Any], config: Mapping[str, Any], family: Family, faults: list[str]) -> None:
    """Sets the fields of the keys whose meaning depends on other fields."""
    for key, rule in family.numbers.items():
        if off := settings.get(rule.off_if):
            settings[rule.sets] = 0 if settings.get(rule.sets) == off else settings.get(rule.sets, 0)
        if set(names_in(rule.value)) == {"value"}:
            continue
        value = _read_number(key, rule, config, faults, again=True)
        if value == 0 and type(value) is int and rule.sets in SWITCHES:
            settings[rule.sets] = 0
            continue
        if value is None or not _is_positive(key, value, faults):
            continue
        result = evaluate(rule.value, {**settings, "value": value})
        if result is not None:
            _store(settings, key, rule, result, value, faults)


def _read_number(key: str, rule: Number, config: Mapping[str, Any], faults: list[str], again: bool = False) -> Any:
    """The key's value, None when it is missing (a fault, told once) or its field is to be derived."""
    if key not in config and rule.absent is None:
        if not again:
            faults.append(f"missing key {key}")
        return None
    value = config.get(key, rule.absent)
    if value is None and rule.null is not None:
        value = rule.null
    if value == DERIVED and config.get(key) is None:
        return None
    if value is None:
        fault = range_fault(rule.sets, None, key)
        faults += [fault] if fault and not again else []
        return None
    return value


def _is_positive(key: str, value: Any, faults: list[str]) -> bool:
    """Whether a formula can be made of the value."""
    good = type(value) in (int, float) and 0 < value < 1e30
    if not good:
        faults.append(f"{key} = {clip(value)}, wanted a number above 0")
    return good


def _store(numbers: dict[str, Any], key: str, rule: Number, result: Any, value: Any, faults: list[str]) -> None:
    whole = isinstance(LIMITS[rule.sets][0], int)
    if whole and isinstance(result, float) and result.is_integer() and rule.value != "value":
        result = int(result)
    label = key if rule.value == "value" else f"{key} = {clip(value)} makes {rule.sets}"
    fault = range_fault(rule.sets, result, label)
    if fault:
        faults.append(fault)
    else:
        numbers[rule.sets] = min(result, numbers.get(rule.sets, result)) if rule.lowers else result


def _flags(config: Mapping[str, Any], family: Family, faults: list[str]) -> dict[str, bool]:
    flags = {}
    for key, flag in family.flags.items():
        value = config.get(key, flag.absent)
        if not isinstance(value, bool):
            faults.append(f"{key} = {clip(value)}, wanted true or false")
        for path in flag.sets:
            flags[path] = value is True
    return flags


def _derive(settings: dict[str, Any], derived: Mapping[str, str], family: Family, faults: list[str]) -> None:
    """Fills in fields that no key says, in the order of `derived`."""
    for path, formula in derived.items():
        if path in settings:
            continue
        value = evaluate(formula, settings)
        if value is None:
            continue
        if isinstance(LIMITS[path][0], int) and not isinstance(value, int):
            above, *below = (f"{family.key_of(name)} = {clip(settings[name])}" for name in names_in(formula))
            field = path.split(".")[1]
            whole = f"{above} is no multiple of {below[0]}" if below else f"{above} makes {field} no whole number"
            faults.append(f"{whole}, and {field} is not given")
        elif fault := range_fault(path, value):
            faults.append(fault)
        else:
            settings[path] = value


def _check_heads(settings: Mapping[str, Any], family: Family, faults: list[str]) -> None:
    heads, kv_heads = settings.get("attention.heads"), settings.get("attention.kv_heads")
    if heads and kv_heads and heads % kv_heads:
        faults.append(
            f"{family.key_of('attention.heads')} = {heads} is no multiple of "
            f"{family.key_of('attention.kv_heads')} = {kv_heads}"
        )
    size = settings.get("attention.head_dim")
    rotates_all = settings.get("position.kind", "rope") == "rope" and not (family.rope and family.rope.partial)
    if size and size % 2 and rotates_all:
        faults.append(f"head_dim = {size}, wanted an even number")


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
