"""The file of `llmc tune`: by target and kernel, the knobs that won, how fast they are, and all that was tried.

JSON, always spelled the same way; checked whole before anything of it is used.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.runtime.loading import schema
from llmc.targets.knobs import CANDIDATES, Knobs

FORMAT = 1
VERDICTS = ("", "holds", "fails")
_MOST_BYTES = 64 << 20
_KNOWN = {knob.name: {getattr(Knobs(), knob.name), *CANDIDATES.get(knob.name, ())} for knob in fields(Knobs)}

Values = dict[str, int]  # knob -> value


@dataclass
class Tried:
    """Knobs that were measured: for each number of rows, the default's time over theirs."""

    knobs: Values
    gain: dict[str, float]
    verdict: str = ""  # "holds" or "fails", once measured for longer, as a winner is before it is taken


@dataclass
class Entry:
    """What is known of one kernel. `best`: the knobs to use; None until all were tried and the winner confirmed."""

    default: Values
    threads: int
    tried: list[Tried] = field(default_factory=list)
    best: Values | None = None
    microseconds: dict[str, list[float]] = field(default_factory=dict)  # rows -> the default's time, the best's


@dataclass
class Section:
    """What is known of one target; `threads`: model -> what it does best with."""

    kernels: dict[str, Entry] = field(default_factory=dict)
    threads: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Database:
    """All targets, by `target_key`."""

    targets: dict[str, Section] = field(default_factory=dict)

    def text(self) -> str:
        """The file's content: the same for the same knowledge."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _values(value: Any, where: str) -> list[str]:
    """An object of knobs, each with a value that may be tried."""
    if not isinstance(value, dict):
        return schema.anything(value, where)
    unknown = sorted(set(value) - set(_KNOWN))
    problems = [f"{where}: unknown knob {key[:60]!r}, llmc knows: {', '.join(_KNOWN)}" for key in unknown]
    checks = {key: schema.one_of(*sorted(values)) for key, values in _KNOWN.items()}
    return problems + [p for key in value if key in checks for p in checks[key](value[key], f"{where}.{key}")]


def _positive(value: Any, where: str) -> list[str]:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15
    return [] if good else [f"{where}: got {str(value)[:60]!r}, wanted a positive number"]


def _by_rows(inner: schema.Check) -> schema.Check:
    """An object whose keys are numbers of rows."""

    def check(value: Any, where: str) -> list[str]:
        problems = schema.mapping(inner)(value, where)
        keys = value if isinstance(value, dict) else {}
        wrong = [key for key in keys if not (key.isascii() and key.isdecimal() and 0 < len(key) < 8)]
        return problems + [f"{where}: key {key[:60]!r} is no number of rows" for key in wrong]

    return check


_ENTRY = schema.record(
    default=_values,
    threads=schema.whole(1, 1024),
    tried=schema.items(schema.record(knobs=_values, gain=_by_rows(_positive), verdict=schema.one_of(*VERDICTS))),
    best=schema.maybe(_values),
    microseconds=_by_rows(schema.items(_positive, 2)),
)
_COUNT = schema.whole(1, 1024)
_SCHEMA = schema.record(
    format=schema.one_of(FORMAT),
    targets=schema.mapping(
        schema.record(
            kernels=schema.mapping(_ENTRY), threads=schema.mapping(schema.record(decode=_COUNT, prefill=_COUNT))
        )
    ),
)


def read_database(path: Path) -> Database:
    """The database in a file. Raises LlmcError, in one line, for anything that `write_database` would not write."""
    raw = _document(path)
    version = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT:
        raise LlmcError(f"{path}: format {version} was made by a newer llmc; this one reads format {FORMAT}")
    problems = _SCHEMA(raw, "database")
    if problems:
        raise LlmcError(f"{path}: not a database of llmc tune: {schema.listed(problems)}")
    return Database({key: _section(section) for key, section in raw["targets"].items()})


def _document(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise LlmcError(f"{path}: cannot read the database: {(error.strerror or str(error)).lower()}") from error
    if len(data) > _MOST_BYTES:
        raise LlmcError(f"{path}: more than {_MOST_BYTES} bytes, so no database of llmc tune")
    try:
        return schema.parse_json(data)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise LlmcError(f"{path}: not a database of llmc tune: not readable as JSON: {reason}") from error


def _section(raw: Mapping[str, Any]) -> Section:
    kernels = {
        key: Entry(**{**entry, "tried": [Tried(**tried) for tried in entry["tried"]]})
        for key, entry in raw["kernels"].items()
    }
    return Section(kernels, dict(raw["threads"]))


def write_database(path: Path, database: Database) -> None:
    """Write the file whole or not at all: aside, then renamed."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.resolve().parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(database.text())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_place(path: Path) -> None:
    """Refuse before any work a file that could not be written."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise LlmcError(f"{path}: its folder does not exist; create {folder} first")
    if not os.access(folder, os.W_OK):
        raise LlmcError(f"{path}: its folder is not writable")
    if path.is_dir():
        raise LlmcError(f"{path}: a folder; name a file")
