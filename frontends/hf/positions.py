"""What config.json says about places in a text: each layer's rope, its sliding window, and layers without either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec import LIMITS, range_fault
from llmc.compiler.spec.fields import clip, near
from llmc.frontends.hf.families import Family
from llmc.frontends.hf.position_rules import Windows
from llmc.frontends.hf.rope import TABLES, rope_settings, with_alpha

_FULL, _SLIDING = "full_attention", "sliding_attention"


def position_keys(family: Family) -> tuple[str, ...]:
    """The keys of config.json that say something about rope, windows and layers without rope."""
    rope = family.rope
    keys: tuple[str, ...] = ()
    if rope:
        partial = rope.partial_keys if rope.partial else ()
        own = tuple(key for key in (rope.original_key, rope.list_key) if key)
        keys = (*rope.keys, *TABLES, *partial, *rope.window_keys, *own)
    return (*keys, *(family.windows.keys() if family.windows else ()), *(family.plain.keys() if family.plain else ()))


def positions(
    config: Mapping[str, Any], family: Family, settings: Mapping[str, Any], faults: list[str]
) -> dict[str, Any]:
    """The settings "position.*", "scaling.*" when rope is scaled, "window.*" when some layers have a window.

    `settings` are those of the numbers, derived ones among them.
    """
    found: dict[str, Any] = {}
    window_rope: dict[str, Any] = {"window.theta": 10000.0}  # means nothing without rope
    rope = family.rope
    if rope and settings.get("position.kind", "rope") == "rope":
        found, window_rope = _ropes(config, family, settings, faults)
    layers = settings.get("sizes.layers")
    if not layers:
        return found
    plain = _listed_plain(config, family, layers, faults)
    windows = _windows(config, family.windows, plain, layers, faults) if family.windows else None
    if windows:
        size, members = windows
        found |= {"window.size": size, "window.layers": members, **window_rope}
    if family.plain and family.plain.rule.startswith("full"):
        beside = family.plain.rule == "full" or _size(config, family.windows, faults) is not None
        members = windows[1] if windows else ()
        plain = tuple(i for i in range(layers) if i not in members) if beside else ()
    listed = _listed_bases(config, family, layers, windows[1] if windows else (), faults)
    return found | ({"position.plain_layers": plain} if plain else {}) | listed


def _ropes(
    config: Mapping[str, Any], family: Family, settings: Mapping[str, Any], faults: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of rope, and those of rope in layers with a window."""
    rule = family.rope
    assert rule is not None
    context = settings.get("sizes.context")
    tables = {key: config[key] for key in TABLES if config.get(key) is not None}
    if not tables and rule.absent:
        tables = {"rope_parameters": rule.absent}
    window_tables: dict[str, Any] = {}
    if rule.window_theta:
        tables, window_tables = _by_layer_type(tables, faults)
    full = rope_settings(tables, rule.keys, rule.theta, rule, config, context, faults)
    full = with_alpha(tables, full, rule, settings.get("attention.head_dim"), faults)
    found: dict[str, Any] = {"position.theta": full.theta, "position.factor": full.factor}
    found |= {f"scaling.{name}": value for name, value in full.scaling.items()}
    if full.growth != 1 and "attention.scale" in settings:
        found["attention.scale"] = settings["attention.scale"] * full.growth
    if full.partial != 1 and "attention.head_dim" in settings:
        found["position.rotary_dim"] = int(settings["attention.head_dim"] * full.partial)
    if not rule.window_theta:
        return found, {"window.theta": full.theta, "window.factor": full.factor}
    own = rope_settings(window_tables, rule.window_keys, rule.window_theta, rule, config, context, faults)
    if own.scaling:
        faults.append(
            f"{' and '.join(window_tables)} is {clip(next(iter(window_tables.values())))}: "
            "llmc scales rope of layers with a window only by a factor"
        )
    unscaled = {"window.scaled": False} if full.scaling else {}
    return found, {"window.theta": own.theta, "window.factor": own.factor, **unscaled}


def _by_layer_type(tables: Mapping[str, Any], faults: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`rope_parameters` of a family with two kinds of layers: tables of the full ones, of those with a window."""
    full = {key: table for key, table in tables.items() if key != "rope_parameters"}
    sliding: dict[str, Any] = {}
    nested = tables.get("rope_parameters", {})
    if not isinstance(nested, dict):
        faults.append(f"rope_parameters = {clip(nested)}, wanted a table or null")
        return full, sliding
    known = (_FULL, _SLIDING)
    if unknown := [near(str(name), known) for name in nested if name not in known]:
        faults.append(f"rope_parameters has unknown keys {', '.join(unknown)}, wanted {' and '.join(known)}")
    for kind, found in ((_FULL, full), (_SLIDING, sliding)):
        if nested.get(kind) is not None:
            found[f"rope_parameters.{kind}"] = nested[kind]
    return full, sliding


def _size(config: Mapping[str, Any], rule: Windows | None, faults: list[str]) -> Any:
    """Tokens of a window, None for none."""
    if rule is None:
        return None
    switch = config.get("use_sliding_window", rule.switch) if rule.switch is not None else True
    if not isinstance(switch, bool):
        faults.append(f"use_sliding_window = {clip(switch)}, wanted true or false")
    return config.get(rule.size_key, rule.size or None) if switch is not False else None


def _windows(
    config: Mapping[str, Any], rule: Windows, plain: tuple[int, ...], layers: int, faults: list[str]
) -> tuple[int, tuple[int, ...]] | None:
    """Size and layers of the sliding window, None when no layer has one."""
    size = _size(config, rule, faults)
    members = _members(config, rule, size, plain, layers, faults)
    if not members:
        return None
    size = size // rule.share + rule.more if type(size) is int else size
    if fault := range_fault("window.size", size, rule.size_key):
        faults.append(fault)
        return None
    return size, members


def _members(
    config: Mapping[str, Any], rule: Windows, size: Any, plain: tuple[int, ...], layers: int, faults: list[str]
) -> tuple[int, ...]:
    types = config.get(rule.types_key) if rule.types else None
    if rule.runs_key and (runs := config.get(rule.runs_key)) is not None:
        types = _spread(runs)
        if types is None:
            faults.append(f"{rule.runs_key} = {clip(runs)}, wanted pairs of a list and a number")
            return ()
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not all(t in rule.names for t in types):
            faults.append(f"{rule.types_key} = {clip(types)}, wanted {layers} times {' or '.join(rule.names)}")
            return ()
        return tuple(i for i, t in enumerate(types) if t == rule.names[1])
    if rule.rule == "listed":
        faults.append(f"missing key {rule.types_key}")
        return ()
    if size is None and (rule.rule != "every" or rule.null_off):
        return ()
    if rule.rule == "every":
        return _periodic(config, rule, layers, faults)
    if rule.rule == "none":
        return ()
    if rule.rule == "plain":
        return plain
    first = config.get("max_window_layers", rule.first) if rule.rule == "after" else 0
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        faults.append(f"max_window_layers = {clip(first)}, wanted a whole number from 0")
        return ()
    return tuple(range(first, layers))


def _periodic(config: Mapping[str, Any], rule: Windows, layers: int, faults: list[str]) -> tuple[int, ...]:
    """All layers but one in each period."""
    period = config.get(rule.period_key, rule.period) if rule.period_key else rule.period
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        faults.append(f"{rule.period_key} = {clip(period)}, wanted a whole number from 1")
        return ()
    full = period - 1 if rule.full == "last" else 0
    return tuple(i for i in range(layers) if i % period != full)


def _spread(runs: Any) -> list[Any] | None:
    """[[["global", "local"], 2]] -> global local global local; None when it is not like that."""
    spread: list[Any] = []
    for run in runs if isinstance(runs, list) else [None]:
        if not isinstance(run, list) or len(run) != 2 or not isinstance(run[0], list) or type(run[1]) is not int:
            return None
        if run[1] * len(run[0]) > LIMITS["sizes.layers"][1]:
            return None
        spread += run[0] * run[1]
    return spread


def _listed_bases(
    config: Mapping[str, Any], family: Family, layers: int, members: tuple[int, ...], faults: list[str]
) -> dict[str, Any]:
    """What a list of every layer's base says, {} for none; `members` are the layers with a window."""
    key = family.rope.list_key if family.rope else ""
    bases = config.get(key) if key else None
    if bases is None:
        return {}
    if not isinstance(bases, list) or len(bases) != layers or any(type(b) not in (int, float) for b in bases):
        faults.append(f"{key} = {clip(bases)}, wanted {layers} numbers")
        return {}
    plain = tuple(i for i, base in enumerate(bases) if not base)
    found: dict[str, Any] = {"position.plain_layers": plain} if plain else {}
    for path, inside in (("position.theta", False), ("window.theta", True)):
        used = {base for i, base in enumerate(bases) if base and (i in members) == inside}
        if len(used) > 1:
            faults.append(f"{key} = {clip(bases)}: llmc has one base for layers with a window and one for the others")
        for base in used:
            if fault := range_fault(path, base, key):
                faults.append(fault)
            else:
                found[path] = float(base)
    return found


def _listed_plain(config: Mapping[str, Any], family: Family, layers: int, faults: list[str]) -> tuple[int, ...]:
    """The layers that a list says have no rope."""
    if family.plain is None or family.plain.rule != "listed":
        return ()
    listed = config.get("no_rope_layers")
    if listed is not None:
        right = isinstance(listed, list) and len(listed) == layers
        if not right or any(type(rotated) is not int or rotated not in (0, 1) for rotated in listed):
            faults.append(f"no_rope_layers = {clip(listed)}, wanted {layers} times 0 or 1")
            return ()
        return tuple(i for i, rotated in enumerate(listed) if not rotated)
    period = config.get("no_rope_layer_interval", family.plain.period)
    if type(period) is not int or period < 1:
        faults.append(f"no_rope_layer_interval = {clip(period)}, wanted a whole number from 1")
        return ()
    return tuple(range(period - 1, layers, period))
