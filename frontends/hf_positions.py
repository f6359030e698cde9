"""What config.json says about places in a text: rope's bases and scaling, and which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec import range_fault
from llmc.compiler.spec_fields import clip, near
from llmc.frontends.hf_families import Family, WindowRule

_FULL, _SLIDING = "full_attention", "sliding_attention"
_TABLES = ("rope_parameters", "rope_scaling")
_WINDOW_THETA = "rope_local_base_freq"
_KINDS = ("default", "linear")
_TABLE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_keys(family: Family) -> tuple[str, ...]:
    """The keys of config.json that say something about rope."""
    return ("rope_theta", *_TABLES, *((_WINDOW_THETA,) if family.window_theta else ()))


def positions(config: dict[str, Any], family: Family, layers: int | None, faults: list[str]) -> dict[str, Any]:
    """The settings "position.*", and "window.*" when some layers have one."""
    tables = {key: config[key] for key in _TABLES if config.get(key) is not None}
    window_tables: dict[str, Any] = {}
    if family.window_theta is not None:
        tables, window_tables = _by_layer_type(tables, faults)
    theta, factor = _rope(tables, "rope_theta", config, family.theta, faults)
    settings: dict[str, Any] = {"position.theta": theta, "position.factor": factor}
    if family.window_theta is not None:
        theta, factor = _rope(window_tables, _WINDOW_THETA, config, family.window_theta, faults)
    windows = _windows(config, family.windows, layers, faults) if family.windows and layers else None
    if windows:
        size, members = windows
        settings |= {"window.size": size, "window.layers": members, "window.theta": theta, "window.factor": factor}
    return settings


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


def _rope(
    tables: Mapping[str, Any], theta_key: str, config: dict[str, Any], default: float, faults: list[str]
) -> tuple[float, float]:
    """Base and factor: transformers 5 writes `rope_parameters`, older ones `rope_scaling` and a key for theta."""
    thetas, factors = {}, {}
    for key, table in tables.items():
        if not isinstance(table, dict):
            faults.append(f"{key} = {clip(table)}, wanted a table or null")
            continue
        kinds = [table[name] for name in ("rope_type", "type") if name in table]
        if any(kind not in _KINDS for kind in kinds) or len(set(kinds)) > 1 or not (kinds or "rope_theta" in table):
            faults.append(
                f"{key} is {clip(table)}: llmc knows rope_type 'default' and 'linear'; "
                "without the key the model runs up to the length it was first trained for"
            )
            continue
        linear = kinds[:1] == ["linear"]
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            faults.append(f"{key}.partial_rotary_factor = {clip(table['partial_rotary_factor'])}, wanted 1")
        known = (*_TABLE_KEYS, "factor") if linear else _TABLE_KEYS
        unknown = [near(str(name), known) for name in table if name not in known]
        if unknown:
            faults.append(f"{key} has unknown keys {', '.join(unknown)}")
        factors[f"{key}.factor"] = table.get("factor") if linear else 1.0
        if "rope_theta" in table:
            thetas[f"{key}.rope_theta"] = table["rope_theta"]
    if config.get(theta_key) is not None:
        thetas[theta_key] = config[theta_key]
    return _agreed("position.theta", thetas, default, faults), _agreed("position.factor", factors, 1.0, faults)


def _agreed(path: str, values: dict[str, Any], default: float, faults: list[str]) -> float:
    """The number that all keys give, `default` when there is no key."""
    wrong = [fault for key, value in values.items() if (fault := range_fault(path, value, key))]
    faults += wrong
    if wrong or not values:
        return default
    if len({float(value) for value in values.values()}) > 1:
        shown = ", ".join(f"{key} = {clip(value)}" for key, value in values.items())
        faults.append(f"{shown} disagree; keep the right one")
    return float(next(iter(values.values())))


def _windows(
    config: dict[str, Any], rule: WindowRule, layers: int, faults: list[str]
) -> tuple[int, tuple[int, ...]] | None:
    """Size and layers of the sliding window, None when no layer has one."""
    keys = {key: config.get(key, default) for key, default in rule.keys.items()}
    size = keys["sliding_window"]
    switch = keys.get("use_sliding_window", True)
    if not isinstance(switch, bool):
        faults.append(f"use_sliding_window = {clip(switch)}, wanted true or false")
    elif not switch:
        size = None
    members = _members(keys, rule.kind, size, layers, faults)
    if not members:
        return None
    if fault := range_fault("window.size", size, "sliding_window"):
        faults.append(fault)
        return None
    return size, members


def _members(keys: dict[str, Any], kind: str, size: Any, layers: int, faults: list[str]) -> tuple[int, ...]:
    types = keys.get("layer_types")
    if types is not None:
        known = (_FULL, _SLIDING)
        if not isinstance(types, list) or len(types) != layers or not all(t in known for t in types):
            faults.append(f"layer_types = {clip(types)}, wanted {layers} times {' or '.join(known)}")
            return ()
        return tuple(i for i, t in enumerate(types) if t == _SLIDING)
    if kind == "every":
        period = keys["sliding_window_pattern"]
        if not isinstance(period, int) or isinstance(period, bool) or period < 1:
            faults.append(f"sliding_window_pattern = {clip(period)}, wanted a whole number from 1")
            return ()
        return tuple(i for i in range(layers) if (i + 1) % period)
    if size is None:
        return ()
    if kind == "all":
        return tuple(range(layers))
    first = keys["max_window_layers"]
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        faults.append(f"max_window_layers = {clip(first)}, wanted a whole number from 0")
        return ()
    return tuple(range(first, layers))
