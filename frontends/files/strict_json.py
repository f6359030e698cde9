"""Reads JSON of an untrusted model: an object, without duplicate keys, NaN or deep nesting."""

from __future__ import annotations

import json
import re
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _BadJson(ValueError):
    """A fault that Python's own JSON reader would let through."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadJson(f"key {clip(key)} appears twice")
            seen.add(key)
    return table


def _refuse_constant(text: str) -> Any:
    raise _BadJson(f"{text} is not a JSON number")


def read_json(data: bytes, label: str) -> dict[str, Any]:
    """The object in `data`. Raises SourceError, naming `label`, for anything else."""
    value = _read(data, label)
    if not isinstance(value, dict):
        raise SourceError(f"{label}: JSON is {clip(value)}, wanted an object")
    return value


def read_list(data: bytes, label: str) -> list[Any]:
    """The list in `data`. Raises SourceError, naming `label`, for anything else."""
    value = _read(data, label)
    if not isinstance(value, list):
        raise SourceError(f"{label}: JSON is {clip(value)}, wanted a list")
    return value


def _read(data: bytes, label: str) -> Any:
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):  # perhaps half of a pair: only then look at every text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise SourceError(f"{label}: JSON is nested too deep") from None
    except UnicodeEncodeError:
        raise SourceError(f"{label}: not valid JSON: a text holds half of a surrogate pair") from None
    except ValueError as error:  # also what is not UTF-8, and numbers of thousands of digits
        reason = str(error).splitlines()[0]
        raise SourceError(f"{label}: not valid JSON: {reason}") from None
    return value
