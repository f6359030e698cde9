"""What config.json says about rope: its base, how it is scaled, how much of a head it turns.

transformers 5 writes one table, `rope_parameters`, older ones `rope_scaling` and keys beside it. Formulas of defaults:
transformers/modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmc.compiler.spec import range_fault
from llmc.compiler.spec.fields import clip, near
from llmc.frontends.hf.position_rules import Rope

TABLES = ("rope_parameters", "rope_scaling")
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_BETA = "llama_4_scaling_beta"
_ANY_KIND = ("rope_type", "type", "rope_theta", _PARTIAL)

# Kind of scaling -> its keys besides those of any kind.
_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"),
    "proportional": ("factor",),
}  # fmt: skip
_SPEC_KINDS = ("llama3", "yarn", "longrope", "dynamic", "proportional")  # that the spec has a block for

# Key of a scaling table -> the field it sets, and what absence or null means; None: it must be there.
_NUMBERS: dict[str, dict[str, tuple[str, float | None]]] = {
    "llama3": {"low_freq_factor": ("low", None), "high_freq_factor": ("high", None)},
    "yarn": {"beta_slow": ("low", 1.0), "beta_fast": ("high", 32.0), _BETA: ("queries", 0.0)},
    "longrope": {},
    "dynamic": {},
    "proportional": {_PARTIAL: ("part", 1.0)},
}


@dataclass(frozen=True)
class RopeSettings:
    """Rope of one kind of layers; `scaling` are fields of the spec's block, {} for none. `partial` of a head turns.

    `growth`: what scores are multiplied with.
    """

    theta: float
    factor: float
    partial: float
    scaling: dict[str, Any] = field(default_factory=dict)
    growth: float = 1.0


def rope_settings(
    tables: Mapping[str, Any], thetas: tuple[str, ...], default: float, rule: Rope, config: Mapping[str, Any],
    context: int | None, faults: list[str],
) -> RopeSettings:  # fmt: skip
    """What `tables` (label -> table) and the keys `thetas` say together; `default` when none says a base."""
    bases: dict[str, Any] = {}
    partials: dict[str, Any] = {}
    factors: dict[str, Any] = {}
    scalings: dict[str, dict[str, Any]] = {}
    for label, table in tables.items():
        kind = _kind(label, table, rule, faults)
        if kind is None:
            continue
        factors[f"{label}.factor"] = table.get("factor") if kind == "linear" else 1.0
        if "rope_theta" in table:
            bases[f"{label}.rope_theta"] = table["rope_theta"]
        if kind != "proportional" and table.get(_PARTIAL) is not None and rule.partial:
            partials[f"{label}.{_PARTIAL}"] = table[_PARTIAL]
        elif kind != "proportional" and table.get(_PARTIAL, 1.0) != 1.0:
            faults.append(f"{label}.{_PARTIAL} = {clip(table[_PARTIAL])}, wanted 1")
        if kind != "linear" and not _has_alpha(table, rule):
            original = config.get(rule.original_key, rule.original) if rule.original_key else table.get(_ORIGINAL)
            scalings[label] = _scaling(label, kind, table, context if original is None else original, context, faults)
    bases |= {key: config[key] for key in thetas if config.get(key) is not None}
    partials |= {key: config[key] for key in rule.partial_keys if rule.partial and config.get(key) is not None}
    if len({repr(sorted(scaling.items())) for scaling in scalings.values()}) > 1:
        faults.append(f"{' and '.join(scalings)} scale rope in different ways; keep the right one")
    return RopeSettings(
        agreed("position.theta", bases, default, faults),
        agreed("position.factor", factors, 1.0, faults),
        _part(partials, rule.partial, faults),
        next(iter(scalings.values()), {}),
        _growth(tables, next(iter(scalings.values()), {})) if rule.scores else 1.0,
    )


def _has_alpha(table: Mapping[str, Any], rule: Rope) -> bool:
    return rule.alpha and table.get("alpha") is not None


def with_alpha(
    tables: Mapping[str, Any], settings: RopeSettings, rule: Rope, size: int | None, faults: list[str]
) -> RopeSettings:
    """The settings with a base that is greater by alpha^(R / (R - 2)), where a table of `tables` has an alpha."""
    there = {label: table for label, table in tables.items() if isinstance(table, dict)}
    alphas = {f"{label}.alpha": table["alpha"] for label, table in there.items() if _has_alpha(table, rule)}
    if not alphas or not size or size < 4:
        return settings
    alpha = agreed("scaling.factor", alphas, 1.0, faults)
    return replace(settings, theta=settings.theta * alpha ** (size / (size - 2)))


def _kind(label: str, table: Any, rule: Rope, faults: list[str]) -> str | None:
    """The table's kind, None after adding to `faults`."""
    if not isinstance(table, dict):
        faults.append(f"{label} = {clip(table)}, wanted a table or null")
        return None
    named = [table[name] for name in ("rope_type", "type") if name in table]
    named = [rule.kinds.get(name, name) if isinstance(name, str) else name for name in named]
    known = isinstance(named[0], str) and named[0] in _KINDS if named else bool({"rope_theta", _PARTIAL} & set(table))
    if not known or any(name != named[0] for name in named):
        faults.append(
            f"{label} is {clip(table)}: llmc knows rope_type {', '.join(map(repr, _KINDS))}; "
            "without the key the model runs up to the length it was first trained for"
        )
        return None
    kind = str(named[0]) if named else "default"
    meant = (*_ANY_KIND, *_KINDS[kind], *(["alpha"] if rule.alpha and kind == "dynamic" else []))
    if rule.queries and kind == "yarn":
        meant = (*meant, _BETA, "max_position_embeddings")  # of which the second says nothing
    unknown = [near(str(name), meant) for name in table if name not in meant]
    if unknown:
        faults.append(f"{label} has unknown keys {', '.join(unknown)}")
    return kind


def _scaling(
    label: str, kind: str, table: Mapping[str, Any], original: Any, context: int | None, faults: list[str]
) -> dict[str, Any]:
    """The fields of the spec's block for a table of one of _SPEC_KINDS; {} for others and after adding to `faults`."""
    if kind not in _SPEC_KINDS or context is None:
        return {}
    before = len(faults)
    fields: dict[str, Any] = {"kind": kind, "original_context": original}
    faults += _fault(f"{label}.{_ORIGINAL}", "original_context", original)
    for key, (name, absent) in _NUMBERS[kind].items():
        fields[name] = absent if table.get(key) is None else table[key]
        faults += _fault(f"{label}.{key}", name, fields[name])
    if len(faults) > before:
        return {}
    factor = table.get("factor")
    if factor is None and kind != "llama3":
        factor = max(1.0, context / original)
    faults += _fault(f"{label}.factor", "factor", factor)
    if kind == "dynamic" and original != context:
        faults.append(f"{label}.{_ORIGINAL} = {clip(original)}, wanted max_position_embeddings = {context} for dynamic")
    if kind == "yarn":
        fields["round_ends"] = table.get("truncate", True)
        if not isinstance(fields["round_ends"], bool):
            faults.append(f"{label}.truncate = {clip(fields['round_ends'])}, wanted true or false")
    if kind == "longrope":
        fields |= _factors(label, table, faults)
    if len(faults) > before:
        return {}
    assert factor is not None
    fields["factor"] = float(factor)
    if kind in ("yarn", "longrope"):
        fields["magnitude"] = _magnitude(label, kind, table, fields["factor"], original, context, faults)
    return fields


def _factors(label: str, table: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """The two lists of longrope."""
    fields = {}
    for key, name in (("short_factor", "short"), ("long_factor", "long")):
        values = table.get(key)
        if not isinstance(values, list) or not all(type(v) in (int, float) and 0 < v < 1e9 for v in values):
            faults.append(f"{label}.{key} = {clip(values)}, wanted a list of numbers above 0")
        else:
            fields[name] = tuple(map(float, values))
    return fields


def _magnitude(
    label: str, kind: str, table: Mapping[str, Any], factor: float, original: int, context: int, faults: list[str]
) -> float:
    """What cosines and sines are multiplied with (arXiv 2309.00071 section 3.4; 2402.13753 equation 9)."""
    given = table.get("attention_factor")
    if given is not None:
        wrong = _fault(f"{label}.attention_factor", "magnitude", given)
        faults += wrong
        return 1.0 if wrong else float(given)
    if kind == "longrope" and "long_mscale" in table:
        name = "long_mscale" if context > original else "short_mscale"
        wrong = _fault(f"{label}.{name}", "magnitude", table.get(name))
        faults += wrong
        return 1.0 if wrong else float(table[name])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    mscales = [table[key] for key in ("mscale", "mscale_all_dim") if table.get(key)]
    if wrong := [clip(mscale) for mscale in mscales if type(mscale) not in (int, float) or not 0 < mscale < 1e3]:
        faults.append(f"{label}: mscale = {wrong[0]}, wanted a number above 0")
        return 1.0
    # Only both together count.
    return _grown(factor, mscales[0]) / _grown(factor, mscales[1]) if len(mscales) == 2 else _grown(factor, 1.0)


def _grown(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _growth(tables: Mapping[str, Any], scaling: Mapping[str, Any]) -> float:
    """What mscale_all_dim makes of scores: queries and keys grow by the same (DeepSeek-V2's yarn_apply_mscale)."""
    found = [table.get("mscale_all_dim") for table in tables.values() if isinstance(table, dict)]
    mscale = next((value for value in found if type(value) in (int, float) and value), 0.0)
    return _grown(scaling["factor"], mscale) ** 2 if scaling else 1.0


def _fault(label: str, name: str, value: Any) -> list[str]:
    fault = range_fault(f"scaling.{name}", value, label)
    return [fault] if fault else []


def _part(values: dict[str, Any], absent: float, faults: list[str]) -> float:
    """The part of a head that turns, 1 when the family always turns all of it."""
    for key, value in values.items():
        if type(value) not in (int, float) or not 0 < value <= 1:
            faults.append(f"{key} = {clip(value)}, wanted a number above 0 and up to 1")
            return 1.0
    if len(set(values.values())) > 1:
        faults.append(_disagreement(values))
    return float(next(iter(values.values()), absent or 1.0))


def agreed(path: str, values: dict[str, Any], default: float, faults: list[str]) -> float:
    """The number that all keys give, `default` when there is no key."""
    wrong = [fault for key, value in values.items() if (fault := range_fault(path, value, key))]
    faults += wrong
    if wrong or not values:
        return default
    if len({float(value) for value in values.values()}) > 1:
        faults.append(_disagreement(values))
    return float(next(iter(values.values())))


def _disagreement(values: dict[str, Any]) -> str:
    shown = ", ".join(f"{key} = {clip(value)}" for key, value in values.items())
    return f"{shown} disagree; keep the right one"
