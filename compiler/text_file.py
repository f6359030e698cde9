"""Text that people write and we read: files in UTF-8, and TOML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llmc.compiler.errors import LlmcError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_text(path: Path, what: str) -> str:
    """The text of a file. Raises LlmcError: "PATH: cannot read WHAT: reason"."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LlmcError(f"{path}: cannot read {what}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise LlmcError(f"{path}: cannot read {what}: not UTF-8 text") from error


def parse_toml(text: str, where: str, limit: int, refusal: type[LlmcError] = LlmcError) -> dict[str, Any]:
    """The table in a TOML text of at most `limit` characters; else a `refusal` that starts with `where`.

    >>> parse_toml('[formats]\\na = "q4"', "recipe", 100)
    {'formats': {'a': 'q4'}}
    """
    if len(text) > limit:
        raise refusal(f"{where}: {len(text)} characters, wanted at most {limit}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or an int of more than 4300 digits
        raise refusal(f"{where}: not TOML: {error or 'nested too deep'}") from None
