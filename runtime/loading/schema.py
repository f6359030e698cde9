"""A strict reader of small JSON documents: every unknown, missing and wrong key is named, all at once.

A check is a function `(value, where) -> list of problems`; an empty list means the value is what it should be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Check = Callable[[Any, str], list[str]]

_SHOWN = 60  # characters of a wrong value that an error quotes
_MAX_LISTED = 5  # problems an error names before it counts the rest


def parse_json(data: bytes) -> Any:
    """The document in `data`. ValueError for anything but one JSON value without duplicate keys, NaN or Infinity."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def canonical_json(value: Any) -> bytes:
    """The one spelling of a document that hashes are taken of.

    >>> canonical_json({"b": 1, "a": "é"}).decode()
    '{"a":"é","b":1}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"keys given twice: {', '.join(twice[:5])}")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _wrong(where: str, value: Any, wanted: str) -> list[str]:
    return [f"{where}: got {quoted(value)}, wanted {wanted}"]


def quoted(value: Any) -> str:
    """A value of the document's, as far as an error shows it."""
    return repr(value)[:_SHOWN]


def text(value: Any, where: str) -> list[str]:
    """A string."""
    return [] if isinstance(value, str) else _wrong(where, value, "a string")


def flag(value: Any, where: str) -> list[str]:
    """true or false."""
    return [] if isinstance(value, bool) else _wrong(where, value, "true or false")


def anything(value: Any, where: str) -> list[str]:
    """An object whose inside is not this reader's business."""
    return [] if isinstance(value, dict) else _wrong(where, value, "an object")


def whole(low: int, high: int) -> Check:
    """An integer in low..high."""

    def check(value: Any, where: str) -> list[str]:
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return [] if good else _wrong(where, value, f"an integer in {low}..{high}")

    return check


def one_of(*choices: Any) -> Check:
    """One of the given values."""

    def check(value: Any, where: str) -> list[str]:
        good = any(type(value) is type(choice) and value == choice for choice in choices)
        return [] if good else _wrong(where, value, " or ".join(map(repr, choices)))

    return check


def sha256_hex(value: Any, where: str) -> list[str]:
    """64 lower-case hexadecimal digits."""
    good = isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
    return [] if good else _wrong(where, value, "64 hexadecimal digits")


def maybe(inner: Check) -> Check:
    """null, or what `inner` takes."""
    return lambda value, where: [] if value is None else inner(value, where)


def items(inner: Check, least: int = 0) -> Check:
    """A list of at least `least` values."""

    def check(value: Any, where: str) -> list[str]:
        if not isinstance(value, list) or len(value) < least:
            return _wrong(where, value, f"a list of {least} or more")
        return [problem for i, item in enumerate(value) for problem in inner(item, f"{where}[{i}]")]

    return check


def mapping(inner: Check) -> Check:
    """An object with any keys."""

    def check(value: Any, where: str) -> list[str]:
        if not isinstance(value, dict):
            return _wrong(where, value, "an object")
        return [p for key, item in value.items() for p in inner(item, f"{where}.{shown(key)}")]

    return check


def shown(key: str) -> str:
    """A key of the document's own choice, on one line."""
    return key[:_SHOWN] if key.isprintable() else repr(key[:_SHOWN])


def either(key: str, with_it: Check, without: Check) -> Check:
    """An object that has `key` and is one thing, or has not and is another."""
    return lambda value, where: (with_it if isinstance(value, dict) and key in value else without)(value, where)


def record(**fields: Check) -> Check:
    """An object with exactly these keys."""

    def check(value: Any, where: str) -> list[str]:
        if not isinstance(value, dict):
            return _wrong(where, value, "an object")
        problems = [f"{where}: unknown key {key[:_SHOWN]!r}" for key in sorted(set(value) - set(fields))]
        problems += [f"{where}: missing key {key!r}" for key in sorted(set(fields) - set(value))]
        for key, inner in fields.items():
            if key in value:
                problems += inner(value[key], f"{where}.{key}")
        return problems

    return check


def listed(problems: list[str]) -> str:
    """The first problems, and how many more."""
    more = len(problems) - _MAX_LISTED
    return "; ".join(problems[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
