"""Strict reading and writing of the spec's dataclasses: every fault is listed at once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import reprlib
import typing
from collections.abc import Iterable
from typing import Any

CLIP = 80  # characters of an untrusted value that an error message shows


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring = 3, 8, 8, CLIP


def clip(value: Any) -> str:
    """`repr` of an untrusted value for an error message: one printable line, at most CLIP long."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an int of more than 4300 digits
        text = "a huge number"
    return text if len(text) <= CLIP else text[: CLIP - 3] + "..."


def near(name: str, known: Iterable[str]) -> str:
    """The name for an error message, with the closest known name if there is one."""
    close = difflib.get_close_matches(name[:CLIP], list(known), n=1)
    return clip(name) + (f" (near: {close[0]})" if close else "")


_types_of = functools.cache(typing.get_type_hints)  # which takes most of the time of reading a spec


def read_dataclass(cls: type, plain: Any, where: str, faults: list[str]) -> Any:
    """A `cls` from a dict, or None after adding to `faults` what is wrong with it."""
    if not isinstance(plain, dict):
        faults.append(f"{where or 'the whole'} is {clip(plain)}, wanted a table")
        return None
    before = len(faults)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    types = _types_of(cls)
    prefix = f"{where}." if where else ""
    values: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in fields:
            faults.append(f"unknown key {prefix}{near(str(key), fields)}")
            continue
        hint = types[key]
        table = table_of(hint)
        if table is not None and (value is not None or table is hint):
            values[key] = read_dataclass(table, value, prefix + key, faults)
        elif table is not None:
            values[key] = None
        else:
            values[key] = _read_value(hint, value, prefix + key, faults)
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or types[name] == (int | None)
        if name not in plain and not optional:
            faults.append(f"missing key {prefix}{name}")
        elif name not in plain and field.default is dataclasses.MISSING:
            values[name] = None  # TOML has no null: an absent `int | None` is None
    return None if len(faults) > before else cls(**values)


def table_of(hint: Any) -> type | None:
    """The dataclass in the annotation of a field, `X` or `X | None`; None for a plain value."""
    found = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
    return typing.cast(type, found[0]) if found else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_value(hint: Any, value: Any, where: str, faults: list[str]) -> Any:
    readers: dict[Any, tuple[str, bool]] = {
        str: ("a text", isinstance(value, str)),
        bool: ("true or false", isinstance(value, bool)),
        int: ("a whole number", _is_int(value)),
        float: ("a number", _is_int(value) or isinstance(value, float)),
        int | None: ("a whole number", value is None or _is_int(value)),
        tuple[int, ...]: (
            "a list of whole numbers",
            isinstance(value, list) and all(map(_is_int, value)),
        ),
        tuple[float, ...]: (
            "a list of numbers",
            isinstance(value, list) and all(_is_int(v) or isinstance(v, float) for v in value),
        ),
        dict[str, str]: (
            "a table of texts",
            isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
        ),
    }
    wanted, fits = readers[hint]
    if not fits:
        faults.append(f"{where} = {clip(value)}, wanted {wanted}")
        return None
    if hint is float:
        try:
            return float(value)
        except OverflowError:
            faults.append(f"{where} is a number too large")
            return None
    return tuple(value) if isinstance(value, list) else value


def _toml_value(value: Any) -> str:
    # JSON's numbers, booleans, lists and escapes are TOML's too; only DEL needs one more.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_toml(plain: dict[str, Any]) -> str:
    """TOML text of a table of values and of tables of values (no deeper); None is left out."""
    plain = {key: value for key, value in plain.items() if value is not None}
    lines = [f"{key} = {_toml_value(v)}" for key, v in plain.items() if not isinstance(v, dict)]
    for key, table in plain.items():
        if not isinstance(table, dict):
            continue
        lines += ["", f"[{key}]"]
        for name, value in table.items():
            if value is not None:
                bare = name.isidentifier() and name.isascii()
                lines.append(f"{name if bare else _toml_value(name)} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"
